"""Models with experts through the Triton kernels against their own modules: scores, tokens and KV.

Families differ by what their spec says alone. Without a GPU they run through Triton's interpreter, in a process of
their own (see tests/serving/kernels/gpu/conftest).
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving.forward.cuda_graphs import GraphSizes, StaticBatch
from serving.model.decoder import Decoder, Layer
from serving.model.moe import MoeMlp
from serving.model.moe_spec import MoeSpec
from serving.model.quantized_linear import hold_int8
from tests.serving.forward.own_process import interpreted
from tests.serving.forward.test_triton_forward import (
    BLOCK_SIZE,
    DEVICE,
    SPEC,
    Case,
    Pair,
    ReplayedByHand,
    error,
    runs_here,
    step_of,
    triton_forward,
)
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED

__all__ = ["triton_forward"]  # the fixture

BOTH, LAST = (True,) * SPEC.layers, (False, True)
MIXTRAL = MoeSpec(experts=5, top_k=2, intermediate=48, sparse=BOTH)
QWEN3 = MoeSpec(experts=12, top_k=8, intermediate=16, sparse=LAST, normalized=False)
UPCYCLED = MoeSpec(experts=3, top_k=1, intermediate=48, sparse=BOTH)


def mixture(moe: MoeSpec, *changes: tuple[str, Any], **kind: Any) -> Case:
    return Case(changes=(("moe", moe), *changes), **kind)


# The router's bfloat16 logits may tie, or fall to either side of one: another expert is another result.
CASES = {
    "mixtral": mixture(MIXTRAL),
    "mixtral in int8 with int8 KV": mixture(MIXTRAL, int8=True, kv_dtype="int8", close=2e-2),
    "qwen3 with a dense layer": mixture(QWEN3, ("qk_norm", True)),
    "qwen3 in bfloat16": mixture(QWEN3, ("qk_norm", True), dtype="bfloat16", close=6e-2),
    "one expert a token": mixture(UPCYCLED),
}


@runs_here
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_decode_steps_are_the_modules(triton_forward: ModuleType, name: str) -> None:
    """A prompt of more rows than a block has, a step of prompts and decodes, and decodes."""
    pair = Pair(triton_forward, CASES[name])
    first, second = [[(7 * i + 3 * s) % pair.vocab for i in range(40)] for s in range(2)]
    pair.step(step_of([first[:20], second[:6]], [0, 0], logits_rows=[19]))
    scores = pair.step(step_of([[first[20]], second[6:9]], [20, 6]))
    tokens = scores.argmax(dim=-1).tolist()
    batch = step_of([[tokens[0]], [tokens[1]]], [21, 9])
    pair.greedy(batch, pair.step(batch))
    alone = step_of([[tokens[0]]], [22], tables=[[5, 2]])
    pair.greedy(alone, pair.step(alone))
    pair.same_kv()


@runs_here
def test_a_chunk_that_nobody_scores_writes_its_kv(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, CASES["mixtral"])
    assert pair.step(step_of([[1, 2, 3]], [0], tables=[[5, 2]], logits_rows=[])).shape == (0, pair.vocab)
    pair.same_kv()


@runs_here
def test_padding_changes_no_row_and_graphs_give_what_launching_gives(
    triton_forward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_forward, "CudaGraphs", ReplayedByHand)
    pair = Pair(triton_forward, CASES["mixtral"])
    pair.kernels.warm_up(4, GraphSizes(sequences=(3,), contexts=(32,)))
    pair.step(step_of([[1, 2, 3], [4] * 5], [0, 0]))
    batch, size = step_of([[9], [8]], [3, 5]), (3, 32)
    static = StaticBatch(GraphSizes(sequences=(3,), contexts=(32,)), BLOCK_SIZE, DEVICE)
    static.fill(batch, size)
    with torch.inference_mode():
        padded = pair.kernels.kernels.logits(static.view(size))[:2]
        replayed = pair.kernels.logits(batch, None)
    assert pair.kernels.graphs.replayed == [size]
    assert torch.equal(replayed, padded) and error(padded, pair.step(batch)) < pair.case.close


@runs_here
def test_tuning_computes_every_kind_of_mixture_once(
    triton_forward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, tuned = Pair(triton_forward, CASES["mixtral"]), []
    mixtures = pair.kernels.kernels.mixtures
    assert list(mixtures) == [0, 1]
    kinds = type(mixtures[0])
    monkeypatch.setattr(kinds, "tune", lambda self, most, dtype: tuned.append((self, most, dtype)))
    pair.kernels.kernels.tune(70)
    assert tuned == [(mixtures[1], 70, torch.float32)]


@runs_here
@pytest.mark.parametrize(
    ("moe", "words"),
    [
        (replace(MIXTRAL, experts=1025), "among 1025 experts"),
        (replace(MIXTRAL, intermediate=2**17), "rows of 131072"),
        (replace(MIXTRAL, scoring="sigmoid"), "does not route experts"),
    ],
)
def test_what_is_not_supported_is_said(triton_forward: ModuleType, moe: MoeSpec, words: str) -> None:
    assert words in (triton_forward.supports(held_nowhere(moe), "float32", planes()) or "")


@runs_here
def test_layers_with_some_experts_in_int8_are_left_to_the_modules(triton_forward: ModuleType) -> None:
    model = held_nowhere(MIXTRAL)
    layer = model.layers[1]
    assert isinstance(layer, Layer) and isinstance(layer.mlp, MoeMlp)
    assert triton_forward.supports(model, "float32", planes()) is None
    with torch.device("meta"):
        hold_int8(model, ["layers.1.mlp.experts.2.down"])
    assert "layers.1.mlp's experts some are INT8" in (triton_forward.supports(model, "float32", planes()) or "")


def held_nowhere(moe: MoeSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(replace(SPEC, moe=moe))


def planes() -> Any:
    return DeviceKV(SPEC.kv_layers("float32"), 1, BLOCK_SIZE).planes[0]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU or find_spec("triton") is None, reason="runs in this process, or cannot run")
def test_all_of_it_under_the_interpreter() -> None:
    interpreted(__file__)
