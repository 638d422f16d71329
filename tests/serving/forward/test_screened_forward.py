"""Which models' heads are screened on a CPU, and that their best tokens are those of the logits."""

from __future__ import annotations

import pytest
import torch

from bench.random_model import SHAPES, llama, random_model
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import best_tokens
from serving.kernels import cpu
from serving.loader.loading import use_float32_head

PROMPT = [(7 * i) % 300 for i in range(40)]


def forward_of(
    weights: str, dtype: torch.dtype, *, tied: bool = False, kept: str = "head", loaded: bool = False
) -> CpuForward:
    """`loaded`: with the head as `load` leaves it on a CPU."""
    spec = llama(**SHAPES["mini"], tied_embeddings=tied)
    kernels = cpu.load(threads=2)
    assert kernels is not None
    model = random_model(spec, weights, dtype, torch.device("cpu"), kept=kept)
    if loaded:
        use_float32_head(model)
    return CpuForward(model, DeviceKV(spec.kv_layers("bfloat16"), 8, 16).planes, kernels, 128, releases=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_best_tokens_are_those_of_the_logits(tied: bool, loaded: bool, rows: int) -> None:
    forward = forward_of("int8", torch.bfloat16, tied=tied, loaded=loaded)
    assert forward.decoder.screen is not None
    batch = RaggedBatch.build(
        tokens=[PROMPT], starts=[0], block_tables=[[1, 2, 3]], block_size=16, logits_rows=range(40 - rows, 40)
    )
    found = forward.greedy(batch, None)
    assert found.tolist() == best_tokens(forward.logits(batch, None)).tolist()
    again, kept = forward.greedy_and_logits(batch, None, [rows - 1])
    assert again.tolist() == found.tolist() and int(kept[0].argmax()) == int(found[-1])


@pytest.mark.parametrize(
    ("weights", "dtype", "kept"),
    [("bf16", torch.bfloat16, "head"), ("int8", torch.float32, "head"), ("int8", torch.bfloat16, "")],
)
def test_only_wide_heads_over_int8_layers_are_screened(weights: str, dtype: torch.dtype, kept: str) -> None:
    assert forward_of(weights, dtype, kept=kept).decoder.screen is None
