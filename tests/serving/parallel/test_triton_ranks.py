"""Ranks that share weights and compute by the Triton kernels, against one process: logits and KV.

The interpreter runs one kernel of a process at a time, so the ranks, threads here, take turns between exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from serving.forward.forward import EagerForward
from serving.model.decoder import Decoder
from serving.model.moe import MoeMlp
from serving.parallel.applying import apply_parallel
from serving.parallel.collective import Collective
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout
from serving.parallel.spread_experts import SpreadMoe
from tests.serving.forward.own_process import interpreted
from tests.serving.forward.test_triton_forward import (
    BIASES,
    BLOCK_SIZE,
    BLOCKS,
    CASES,
    Case,
    error,
    runs_here,
    step_of,
    tiny,
    triton_forward,
)
from tests.serving.forward.test_triton_sparse import CASES as SPARSE
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED
from tests.serving.parallel.groups import Threads

__all__ = ["triton_forward"]  # the fixture

LAYOUT = ParallelLayout(tensor=2)
ROWS = ParallelLayout(sequence=2)
SPREAD = ParallelLayout(sequence=2, spread_experts=True)
BIASED = Case(changes=tuple(BIASES.items()))
SHARED = {
    "float32": (CASES["float32"], LAYOUT),
    "bfloat16": (CASES["bfloat16"], LAYOUT),
    "biases": (BIASED, LAYOUT),
    "rows with biases": (BIASED, ROWS),
    "rows in int8": (CASES["int8"], ROWS),
    "rows and experts": (SPARSE["mixtral"], SPREAD),
    "rows and int8 experts": (SPARSE["mixtral in int8 with int8 KV"], SPREAD),
    "rows, experts and a dense layer": (SPARSE["qwen3 with a dense layer"], SPREAD),
}


def places_of_exchanges(model: Decoder) -> list[int]:
    mixtures = [module for module in model.modules() if isinstance(module, SpreadMoe)]
    return [room.data_ptr() for mlp in mixtures for room in mlp.exchange._memory.values()]


class Turns:
    """Lets one rank compute at a time, and all of them exchange."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lock = Lock()
        run = Collective._run

        def exchanging(group: Collective, *arguments: Any) -> None:
            self.lock.release()
            try:
                run(group, *arguments)
            finally:
                self.lock.acquire()

        patch.setattr(Collective, "_run", exchanging)


def share_of(case: Case, threads: Threads, rank: int) -> Decoder:
    model = tiny(case)
    hold_share(model, threads.layout, rank)
    return apply_parallel(model, threads.ranks[rank])


@runs_here
@pytest.mark.skipif(not INTERPRETED, reason="ranks of one process are threads of one device")
@pytest.mark.parametrize("name", SHARED)
def test_ranks_compute_what_one_process_does(
    triton_forward: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, a step of fewer rows than one rank has of the first, and a step of one row for two ranks."""
    case, layout = SHARED[name]
    # Shares of bfloat16 are rounded before they are summed; an int8 may round to either side of a tie.
    close = 2 * case.close if case.dtype == "bfloat16" else max(1e-5, case.close)
    kv_dtype = case.kv_dtype or case.dtype
    whole = tiny(case)
    alone = EagerForward(whole, DeviceKV(whole.spec.kv_layers(kv_dtype), BLOCKS, BLOCK_SIZE).planes)
    steps = [
        step_of([[*range(13)], [*range(20, 26)]], [0, 0]),
        step_of([[40], [*range(26, 35)]], [13, 6]),
        step_of([[41], [42]], [14, 15]),
        step_of([[43]], [15], tables=[[5, 2]]),
    ]
    with torch.inference_mode():
        expected = [alone.logits(batch, None) for batch in steps]
    with Threads(layout) as threads:
        turns = Turns(monkeypatch)

        def run(rank: int) -> tuple[list[Tensor], Sequence[tuple[Tensor, ...]]]:
            with turns.lock, torch.inference_mode():
                model = share_of(case, threads, rank)
                planes = DeviceKV(model.spec.kv_layers(kv_dtype), BLOCKS, BLOCK_SIZE).planes
                assert triton_forward.supports(model, case.dtype, planes[0]) is None
                forward = triton_forward.TritonForward(model, planes, whole.spec.max_position)
                forward.kernels.ranks.reserve(19)
                before = places_of_exchanges(model)
                found = [forward.logits(batch, None) for batch in steps]
                assert places_of_exchanges(model) == before, "a graph would name other memory"
                return found, planes

        found = threads.each(run)
    for one, other, wanted in zip(found[0][0], found[1][0], expected, strict=True):
        assert torch.equal(one, other) and one.shape == wanted.shape and one.dtype is torch.float32
        assert error(one, wanted) < close
    for layer, wanted_planes in enumerate(alone.planes):
        for plane, wanted in enumerate(wanted_planes):
            heads = torch.cat([planes[layer][plane] for _, planes in found], dim=2)
            if wanted.dtype is torch.int8:
                assert int((heads.int() - wanted.int()).abs().max()) <= 2
            else:
                assert wanted.any() and error(heads, wanted) < close


@runs_here
def test_other_shares_are_left_to_the_modules(triton_forward: ModuleType) -> None:
    """Integers are summed before they are scaled, which the kernels do not; stages and experts' widths are others'."""
    for case, layout in (
        (CASES["int8"], LAYOUT),
        (SPARSE["mixtral"], LAYOUT),
        (CASES["float32"], ParallelLayout(pipeline=2)),
        (CASES["float32"], ParallelLayout(pipeline=2, sequence=2)),
    ):
        with Threads(layout) as threads:
            model = tiny(case)
            hold_share(model, layout, 0)
            apply_parallel(model, threads.ranks[0])
            planes = DeviceKV(model.spec.kv_layers("float32"), 1, BLOCK_SIZE).planes
            assert "shared rows, or shared weights in floats, alone" in (
                triton_forward.supports(model, "float32", planes[0]) or ""
            )


@runs_here
def test_ranks_that_share_widths_of_experts_in_floats_are_left_to_the_modules(triton_forward: ModuleType) -> None:
    """What they make of a row is a part of it, in a mixture whose first layers are INT8."""
    model, floats = (tiny(SPARSE[name]) for name in ("mixtral in int8 with int8 KV", "mixtral"))
    for layer, wide in zip(model.layers, floats.layers, strict=True):
        assert isinstance(layer.mlp, MoeMlp) and isinstance(wide.mlp, MoeMlp)
        layer.attention.set_submodule("o", wide.attention.get_submodule("o"))
        for expert, other in zip(layer.mlp.experts, wide.mlp.experts, strict=True):
            expert.set_submodule("down", other.get_submodule("down"))
    model.set_submodule("head", floats.head)
    layout = ParallelLayout(tensor=2)
    with Threads(layout) as threads:
        hold_share(model, layout, 0)
        apply_parallel(model, threads.ranks[0])
        planes = DeviceKV(model.spec.kv_layers("float32"), 1, BLOCK_SIZE).planes
        assert "ranks share the widths" in (triton_forward.supports(model, "float32", planes[0]) or "")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU or find_spec("triton") is None, reason="runs in this process, or cannot run")
def test_all_of_it_under_the_interpreter() -> None:
    interpreted(__file__)
