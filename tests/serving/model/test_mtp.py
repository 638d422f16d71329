"""DeepSeek-V3's layer that predicts further tokens: against transformers, against the paper, and how it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from serving.batch.ragged import RaggedBatch
from serving.loader.loading import LoadedModel, load
from serving.loader.mtp import load_mtp
from serving.model.mtp import MtpHead
from tests.mtp_folder import CONFIG, deepseek_with_mtp
from tests.serving.model.oracle import VOCAB
from tests.tiny import tiny_llama

BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_with_mtp(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder, "float32")


def random_tokens(count: int) -> list[int]:
    found: list[int] = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(4)).tolist()
    return found


class Paged:
    """The decoder and its layer over blocks in some order, fed in parts of any length."""

    def __init__(self, loaded: LoadedModel, head: MtpHead, blocks: int = 16):
        self.main, self.head = loaded.model, head
        layers = head.spec.kv_layers("float32")
        self.kv = [tuple(torch.full((blocks, BLOCK, *p.shape), torch.nan) for p in one.planes) for one in layers]
        self.table = list(reversed(range(blocks)))

    def batch(self, tokens: list[int], start: int) -> RaggedBatch:
        return RaggedBatch.build(tokens=[tokens], starts=[start], block_tables=[self.table], block_size=BLOCK)

    @torch.inference_mode()
    def logits(self, tokens: list[int], parts: list[int]) -> Tensor:
        """Scores [T - 1, V] of the token after each but the first, by the layer."""
        hidden: Tensor = self.main(self.batch(tokens, 0), self.kv[:-1])
        found, start = [], 0
        for count in parts:
            batch = self.batch(tokens[start + 1 : start + 1 + count], start)
            found.append(self.head(self.main, batch, hidden[start : start + count], self.kv[-1]))
            start += count
        return self.head.logits(self.main, torch.cat(found))


def theirs(folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    patterns = [r"model\.layers\.3\."]  # what transformers takes for the layer's weights: 61 is in its source
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", patterns)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    layer = MtpModel.from_pretrained(main).eval()
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        hidden = main.model(ids, use_cache=False).last_hidden_state[:, :-1]
        positions = torch.arange(len(tokens) - 1)[None]
        cache = MtpCache(config=main.config.get_mtp_config())
        out = layer.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])
        scores: Tensor = main.lm_head(out)[0]
    return scores


@pytest.mark.parametrize("parts", [[40], [7] * 5 + [5], [1] * 40, [1, 12, 1, 26]])
def test_scores_are_those_of_transformers(
    folder: Path, loaded: LoadedModel, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(41)
    found = Paged(loaded, load_mtp(loaded)).logits(tokens, parts)
    torch.testing.assert_close(found, theirs(folder, tokens, monkeypatch), atol=1e-4, rtol=0)


def test_the_layer_gets_what_the_papers_formula_says(folder: Path, loaded: LoadedModel) -> None:
    """h' = M [RMSNorm(h); RMSNorm(Emb(t))], formula 21, with the embedding first as the published weights have it."""
    head, tokens = load_mtp(loaded), random_tokens(9)
    weights = load_file(folder / "model.safetensors")
    seen: list[Tensor] = []
    head.layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    paged = Paged(loaded, head)
    paged.logits(tokens, [8])
    with torch.inference_mode():
        hidden = paged.main(paged.batch(tokens, 0), paged.kv[:-1])[:-1]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"model.layers.3.{name}.weight"], CONFIG["rms_norm_eps"])

    embedded = weights["model.embed_tokens.weight"][tokens[1:]]
    stacked = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), dim=-1)
    torch.testing.assert_close(seen[0], stacked @ weights["model.layers.3.eh_proj.weight"].T, atol=1e-5, rtol=0)


def test_a_head_that_is_the_models_is_not_kept_twice(loaded: LoadedModel, tmp_path: Path) -> None:
    assert load_mtp(loaded).head is None
    own = load(deepseek_with_mtp(tmp_path, own_head=True), "float32")
    head = load_mtp(own)
    assert head.head is not None
    hidden = torch.ones(1, own.spec.hidden)
    assert not torch.equal(head.logits(own.model, hidden), own.model.logits(hidden))


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3\.eh_proj\.weight"):
        load_mtp(load(tmp_path, "float32"))


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny \(llama\) has no layer that predicts further tokens"):
        load_mtp(load(tiny_llama(tmp_path / "tiny"), "float32"))


def test_of_a_model_out_of_the_pool_the_files_are_looked_for(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is then the name it was asked for by."""
    monkeypatch.setattr("serving.loader.mtp.resolve", {"owner/name": folder}.__getitem__)
    written = load_file(folder / "model.safetensors")[f"model.layers.{loaded.spec.layers}.eh_proj.weight"]
    assert torch.equal(load_mtp(replace(loaded, path=Path("owner/name"))).eh_proj.weight, written)
