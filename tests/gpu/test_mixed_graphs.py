"""Steps with prompts from graphs, on a device that does its work as late as it may: the tokens and KV of launching."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.memory.device import DeviceKV
from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine
from serving.forward.cuda_graphs import GraphSizes
from serving.forward.mixed_graphs import MixedSizes
from tests.gpu.fake_cuda import DEVICE, installed
from tests.gpu.fake_graphs import GraphingCuda
from tests.gpu.late_forward import SPEC
from tests.gpu.paged_kernels import PagedKernels, next_token
from tests.gpu.watching_worker import BUDGET, SIZE, Worker

ORDERS = st.builds(GraphingCuda, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.8]))
SIZES = GraphSizes(
    sequences=(1, 8), contexts=(64, 200), mixed=MixedSizes(sequences=(3, 8), contexts=(200,), tokens=(10, BUDGET))
)


def graphed(cuda: GraphingCuda, device_kv: DeviceKV, sizes: GraphSizes | None = SIZES) -> Any:
    """The Triton path's forward pass with other kernels."""
    pytest.importorskip("triton")
    from serving.forward.triton_forward import TritonForward

    forward = object.__new__(TritonForward)
    forward.model, forward.device, forward.block_size = Shape(), DEVICE, SIZE  # type: ignore[assignment]
    forward.kernels = forward.launched = PagedKernels(cuda, device_kv)  # type: ignore[assignment]
    forward.graphs = forward.mixed = None
    forward.warm_up(BUDGET, sizes)
    return forward


class Shape:
    """As much of a model as warming up asks for."""

    spec = SPEC


@pytest.mark.parametrize("kind", [Engine, OverlapEngine])
@settings(max_examples=6, deadline=None)
@given(cuda=ORDERS, prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3), outputs=st.integers(1, 5))
def test_steps_with_prompts_come_from_graphs(
    kind: type[Engine], cuda: GraphingCuda, prompts: list[int], outputs: int
) -> None:
    with installed(cuda), torch.inference_mode():
        worker = Worker(cuda, kind, partial(graphed, cuda), next_token)
        launches = cuda.total("launch")
        worker.serve(prompts, outputs)
    steps = worker.engine.totals.steps
    assert cuda.total("replay") == steps, "every step"
    # Of a step: its batch copied to where the graph reads it, its tokens copied from where the graph writes them.
    assert cuda.total("launch") - launches <= 18 * steps
    assert worker.published >= sum(length // SIZE for length in prompts)


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_a_step_that_fits_no_graph_is_launched(sizes: GraphSizes | None) -> None:
    """With graphs only those; prompts whose budget is more than any graph has tokens for."""
    cuda = GraphingCuda(3, 0.3)
    if sizes is not None:
        sizes = GraphSizes(
            sequences=(8,), contexts=(200,), mixed=MixedSizes(sequences=(8,), contexts=(200,), tokens=(12,))
        )
    with installed(cuda), torch.inference_mode():
        worker = Worker(cuda, Engine, lambda kv: graphed(cuda, kv, sizes), next_token)
        worker.serve([BUDGET, 30, 5], 3)
    assert worker.engine.totals.steps > cuda.total("replay") and bool(cuda.total("replay")) == (sizes is not None)
