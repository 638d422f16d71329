"""Latent attention: its two forms agree, over KV of every kind; and what a DeepSeek checkpoint may not be."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcache.memory.kv_dtype import stored_as
from serving.batch.ragged import KVSegment, RaggedBatch
from serving.kvspec import mla
from serving.loader.loading import LoadedModel, load
from serving.model.fused_shape import unlike_llama
from serving.model.hf_config import spec_from_hf
from serving.model.mla import MlaAttention, hold_float32
from serving.model.mla_spec import MlaSpec
from serving.model.moe_spec import MoeSpec
from tests.serving.model.oracle import VOCAB, build, configs, expected_logits, save
from tests.serving.model.paged import SCHEDULES, PagedRun, run_whole

DEEPSEEK_V3: dict[str, Any] = {  # of the published config.json
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["deepseek_v3"]), tmp_path_factory.mktemp("deepseek_v3"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, "float32")


def sequences() -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(VOCAB) for _ in range(length)] for length in (41, 9, 33)]


def logits(loaded: LoadedModel, schedule: str, block_size: int = 4) -> list[Tensor]:
    run = PagedRun(loaded.model, sequences(), block_size=block_size)
    SCHEDULES[schedule](run)
    return [run.result(s) for s in range(3)]


def always(monkeypatch: pytest.MonkeyPatch, expanded: bool) -> None:
    monkeypatch.setattr(MlaSpec, "expands", lambda spec, new, context: expanded)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_absorbed_and_expanded_agree(loaded: LoadedModel, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for expanded in (True, False):
        always(monkeypatch, expanded)
        found.append(logits(loaded, schedule))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert any(not torch.equal(*pair) for pair in zip(*found, strict=True)), "one form was computed twice"


@pytest.mark.parametrize("expanded", [True, False])
def test_a_context_of_several_segments(
    loaded: LoadedModel, folder: Path, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, expanded)
    monkeypatch.setattr(import_module("serving.kernels.latent_attention"), "SEGMENT", 8)
    monkeypatch.setattr(import_module("serving.kernels.offloaded_attention"), "QUERY_BLOCK", 3)
    oracle = build(configs()["deepseek_v3"])
    for found, tokens in zip(logits(loaded, "chunks"), sequences(), strict=True):
        torch.testing.assert_close(found, expected_logits(oracle, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("expanded", [True, False])
def test_int8_kv_stays_close(loaded: LoadedModel, expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms read the same integers; how far that is from float KV is what rounding to 8 bits costs."""
    always(monkeypatch, expanded)
    monkeypatch.setattr(MoeSpec, "top_k", 12)  # all experts, so that rounding changes no choice
    exact = logits(loaded, "whole")
    run = PagedRun(loaded.model, sequences(), block_size=4, kv_dtype="int8")
    run_whole(run)
    for s, expected in enumerate(exact):
        error = float((run.result(s) - expected).norm() / expected.norm())
        assert 0 < error < 0.05


class Offloaded:
    """A sequence's first tokens, handed out in segments of 128, one layer after the other."""

    def __init__(self, kv: list[tuple[Tensor, ...]], blocks: list[int], block_size: int, tokens: int) -> None:
        self.kv, self.blocks, self.block_size, self.tokens = iter(kv), blocks, block_size, tokens

    def segments(self) -> Any:
        planes = next(self.kv)
        each = 128 // self.block_size
        for first in range(0, self.tokens, 128):
            ids = self.blocks[first // self.block_size :][:each]
            yield KVSegment(tuple(plane[ids] for plane in planes), first, 128)


@pytest.mark.parametrize("expanded", [True, False])
def test_kv_that_passes_through_the_device(
    loaded: LoadedModel, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 256 of 300 tokens are not in the pool when the last 20 are computed."""
    always(monkeypatch, expanded)
    chance = random.Random(5)
    tokens = [[chance.randrange(VOCAB) for _ in range(300)]]
    run = PagedRun(loaded.model, tokens, block_size=16)
    run.step({0: 280})
    offloaded = Offloaded([tuple(p.clone() for p in planes) for planes in run.kv], run.tables[0], 16, 256)
    run.step({0: 20})
    expected = run.result(0)[280:]
    run.done, run.logits = [280], [[]]
    for planes in run.kv:
        for plane in planes:
            plane[run.tables[0][:16]] = torch.nan
    run.step({0: 20}, offloaded)
    torch.testing.assert_close(run.result(0), expected, atol=1e-4, rtol=0)


def test_kv_is_a_latent_and_a_key_that_heads_share(loaded: LoadedModel) -> None:
    assert loaded.spec.kv_layers("bfloat16") == (mla(40, 8, "bfloat16"),) * 3
    assert loaded.spec.kv_layers("int8") == tuple(stored_as(one, "int8") for one in loaded.spec.kv_layers("float32"))
    assert mla(512, 64, "bfloat16").token_bytes == 1152
    assert mla(512, 64, "bfloat16").heads is None


def test_the_published_config_of_deepseek_v3() -> None:
    spec = spec_from_hf(DEEPSEEK_V3)
    assert spec.mla is not None and spec.moe is not None
    assert spec.mla.scale == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)
    assert spec.rope is not None and spec.rope.magnitude == 1.0 and len(spec.rope.frequencies) == 32
    assert spec.moe.sparse == (False,) * 3 + (True,) * 58
    assert (spec.moe.shared_intermediate, spec.moe.scaling, spec.moe.group_best) == (2048, 2.5, 2)
    assert spec.mtp_layers == 1


V3 = MlaSpec(kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, scale=192**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("new", "context"), [(1, 100), (30, 100), (300, 300)])
def test_both_forms_of_deepseek_v3s_widths_agree(dtype: torch.dtype, new: int, context: int) -> None:
    """Whatever the KV is stored as, both compute in float32: only the order of sums is another."""
    generator = torch.Generator().manual_seed(new)
    attention = MlaAttention(64, 2, V3).to(dtype)
    attention.kv_b.weight.data.normal_(std=512**-0.5, generator=generator)
    hold_float32(attention)
    blocks = -(-context // 16)
    planes = tuple(torch.randn(blocks, 16, width, generator=generator).to(dtype) for width in (512, 64))
    nope, turned = (torch.randn(new, 2, width, generator=generator).to(dtype) for width in (128, 64))
    batch = RaggedBatch.build(tokens=[[0] * new], starts=[context - new], block_tables=[range(blocks)], block_size=16)
    found = [form(nope, turned, batch, planes) for form in (attention.absorbed, attention.expanded)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert not torch.equal(*found), "one form was computed twice"


@pytest.mark.parametrize(("context", "first"), [(16, 13), (64, 39), (256, 82), (1024, 116), (4096, 128), (163840, 133)])
def test_from_how_many_new_tokens_keys_are_expanded(context: int, first: int) -> None:
    """With the widths of DeepSeek-V3: below what the count of multiply-adds says (171 over long contexts)."""
    assert next(new for new in range(1, 200) if V3.expands(new, context)) == first
    assert V3.expands(context, context), "a prompt of its own always"
    wide = replace(V3, nope_dim=600, value_dim=600)
    assert not wide.expands(2048, 163840), "where a head's key and value are wider than the latent it never pays"


def test_what_expands_latents_is_widened_once(folder: Path) -> None:
    """It has the values that the model's type holds, and steps widen nothing."""
    exact, loaded = load(folder, "float32"), load(folder, "bfloat16")
    for layer, one in zip(loaded.model.layers, exact.model.layers, strict=True):
        held, source = layer.attention.kv_b, one.attention.kv_b
        assert held.weight.dtype == torch.float32
        assert torch.equal(held.weight, source.weight.bfloat16().float())
        assert held.per_head()[0].data_ptr() == held.weight.data_ptr(), "no copy is made"
        assert layer.attention.o.weight.dtype == torch.bfloat16


def test_the_compiled_forms_leave_it_to_torch(loaded: LoadedModel) -> None:
    assert unlike_llama(loaded.spec) == "the fused step has no latent attention"


def test_layers_without_experts() -> None:
    every_other = spec_from_hf(DEEPSEEK_V3 | {"moe_layer_freq": 2, "num_hidden_layers": 8})
    assert every_other.moe is not None
    assert [i for i, sparse in enumerate(every_other.moe.sparse) if sparse] == [4, 6]
    assert spec_from_hf(DEEPSEEK_V3 | {"n_routed_experts": None}).moe is None


def test_weights_of_deepseek_v2_are_normalized_or_scaled() -> None:
    """As its own code does; `transformers` scales in any case, and never normalizes."""
    v2 = DEEPSEEK_V3 | {"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax"}
    for normalized, scaling in ((True, 1.0), (False, 2.5)):
        moe = spec_from_hf(v2 | {"norm_topk_prob": normalized}).moe
        assert moe is not None and (moe.normalized, moe.scaling, moe.groups) == (normalized, scaling, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported for deepseek_v3; supported is 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias without q_lora_rank"),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
            r"'fp8' quantized checkpoints are not supported \(quantization_config.quant_method\)",
        ),
    ],
)
def test_what_is_not_covered_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_hf(DEEPSEEK_V3 | change)


@pytest.mark.parametrize("key", ["kv_lora_rank", "v_head_dim", "qk_rope_head_dim", "num_experts_per_tok"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        spec_from_hf({name: value for name, value in DEEPSEEK_V3.items() if name != key})


def changed(folder: Path, to: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    to.mkdir()
    held = load_file(folder / "model.safetensors") | tensors
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return to


def test_layers_that_predict_further_tokens_are_left_out(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4), "model.layers.3.enorm.weight": torch.zeros(4)}
    with_mtp = load(changed(folder, tmp_path / "mtp", extra, num_nextn_predict_layers=1), "float32")
    assert with_mtp.model.state_dict().keys() == loaded.model.state_dict().keys()
    with pytest.raises(ValueError, match=r"has not: model\.layers\.3\.eh_proj"):
        load(changed(folder, tmp_path / "none", extra, num_nextn_predict_layers=0), "float32")


def test_an_int8_expansion_is_refused(folder: Path, tmp_path: Path) -> None:
    """It has no place for scales, and without them would compute nonsense."""
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    wrong = {name: torch.ones(44, 40, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight is INT8, which is not supported for this tensor"):
        load(changed(folder, tmp_path / "int8", wrong), "float32")


def test_a_bfloat16_model_keeps_its_routers_in_float32(folder: Path) -> None:
    model = load(folder, "bfloat16").model
    wide = {name for name, value in model.named_parameters() if value.dtype == torch.float32 and name != "head.weight"}
    kept = {name for name in wide if not name.endswith("kv_b.weight")}  # that one is rounded all the same
    assert kept == {f"layers.{layer}.mlp.router.{leaf}" for layer in (1, 2) for leaf in ("weight", "correction")}
