"""GGUF files: every tensor type, every architecture's names and metadata, and damage of every kind."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, PreTrainedModel

from serving.checkpoint.gguf_file import GgufFile
from serving.loader.loading import load
from tests.serving.model.gguf_writing import gguf_tensors, write_gguf
from tests.serving.model.oracle import COMMON, LONGROPE_ORIGINAL, VOCAB, build, configs, expected_logits
from tests.serving.model.paged import PagedRun, run_mixed

KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")]
SCALE_BYTES = {"Q4_K": (0, 4), "Q6_K": (208, 210)}  # where a block keeps its float16 scales


@pytest.fixture(scope="module")
def wide_llama() -> PreTrainedModel:
    """Widths are multiples of 256, which K-quants need."""
    return build(
        LlamaConfig(
            **COMMON | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}, attention_bias=True
        )
    )


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Valid random bytes of a K-quant matrix: the package can read those, not write them."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (shape[0], shape[1] // per_block, size), dtype=np.uint8)
    first, last = SCALE_BYTES[kind.name]
    scales = chance.uniform(1e-4, 1e-2, (*blocks.shape[:2], (last - first) // 2)).astype(np.float16)
    blocks[..., first:last] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_tensor_type_is_read_as_the_package_reads_it(
    kind: gguf.GGMLQuantizationType, wide_llama: PreTrainedModel, tmp_path: Path
) -> None:
    stored = gguf_tensors(wide_llama)
    raw = None
    if kind.name in SCALE_BYTES:
        raw = {name: random_blocks(kind, v.shape, i) for i, (name, v) in enumerate(stored.items()) if v.ndim == 2}
    path = write_gguf(tmp_path / "model.gguf", wide_llama, kind, raw)
    truth = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}

    def halves(name: str, heads: int) -> torch.Tensor:
        value = torch.tensor(truth[name])
        return value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)

    loaded = load(path, "float32")
    weights = dict(loaded.model.named_parameters())
    for leaf in ("weight", "bias"):
        q, k = halves(f"blk.0.attn_q.{leaf}", 4), halves(f"blk.0.attn_k.{leaf}", 2)
        expected = torch.cat([q, k, torch.tensor(truth[f"blk.0.attn_v.{leaf}"])])
        assert torch.equal(weights[f"layers.0.attention.qkv.{leaf}"], expected)
    gate_up = [torch.tensor(truth[f"blk.0.ffn_{side}.weight"]) for side in ("gate", "up")]
    assert torch.equal(weights["layers.0.mlp.gate_up.weight"], torch.cat(gate_up))
    assert torch.equal(weights["embed.weight"], torch.tensor(truth["token_embd.weight"]))
    assert torch.equal(weights["norm.weight"], torch.tensor(truth["output_norm.weight"]))
    if raw is None:  # the package's own quantizing is near what it was given
        assert np.abs(truth["token_embd.weight"] - stored["token_embd.weight"]).max() < 0.35


@pytest.mark.parametrize(
    "name",
    [
        "llama2",
        "llama3",
        "llama_linear",
        "smollm2",
        "qwen2",
        "qwen2_yarn",
        "qwen3",
        "phi3",
        "phi3_partial",
        "phi3_longrope",
        "gpt2",
    ],
)
def test_logits_of_every_architecture(name: str, tmp_path: Path) -> None:
    oracle = build(configs()[name])
    loaded = load(write_gguf(tmp_path / "model.gguf", oracle), "float32")
    chance = random.Random(3)
    sequences = [[chance.randrange(VOCAB) for _ in range(length)] for length in (37, LONGROPE_ORIGINAL - 4)]
    run = PagedRun(loaded.model, sequences, block_size=4)
    run_mixed(run)
    for s, tokens in enumerate(sequences):
        torch.testing.assert_close(run.result(s), expected_logits(oracle, tokens), atol=1e-4, rtol=0)


def test_metadata_and_default_dtype(wide_llama: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_llama)
    metadata = GgufFile(path).metadata
    assert metadata["tokenizer.ggml.tokens"][:2] == ["token 0", "token 1"]
    assert metadata["tokenizer.ggml.scores"] == [0.5] * VOCAB
    loaded = load(path)
    assert loaded.dtype == "bfloat16"
    assert {parameter.dtype for parameter in loaded.model.layers.parameters()} == {torch.bfloat16}
    assert loaded.model.head.weight.dtype == torch.float32, "scores are not rounded to bfloat16"
    assert loaded.spec.eos_token_ids == (2, 5)
    assert loaded.spec.bos_token_id == 1


def test_damage_is_named(wide_llama: PreTrainedModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", wide_llama)
    whole = path.read_bytes()
    for length, message in ((40, "its header"), (len(whole) // 2, "ends past its last byte")):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=message):
            load(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(path)


def test_what_is_not_covered_is_refused(wide_llama: PreTrainedModel, tmp_path: Path) -> None:
    def written(architecture: str, **numbers: int) -> Path:
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in numbers.items():
            writer.add_uint32(key.replace("__", "."), value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    with pytest.raises(ValueError, match="architecture 'mamba' is not supported"):
        load(written("mamba"))
    with pytest.raises(ValueError, match="mixture of experts"):
        load(written("llama", llama__expert_count=8))
    with pytest.raises(ValueError, match=r"no llama\.embedding_length"):
        load(written("llama"))
    with pytest.raises(ValueError, match="split GGUF"):
        load(written("llama", split__count=2))
    path = tmp_path / "kind.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 24), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="is Q5_1; readable are"):
        load(path)
