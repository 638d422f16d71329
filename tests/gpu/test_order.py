"""Nothing counts before its step's event: on a device that does its work as late as it may, all counted KV is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine
from tests.gpu.fake_cuda import FakeCuda, installed
from tests.gpu.watching_worker import SIZE, Worker

ORDERS = st.builds(FakeCuda, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.8]))


@pytest.mark.parametrize("kind", [Engine, OverlapEngine])
@settings(max_examples=8, deadline=None)
@given(cuda=ORDERS, prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3), outputs=st.integers(1, 5))
def test_kv_is_there_when_it_is_counted_and_published(
    kind: type[Engine], cuda: FakeCuda, prompts: list[int], outputs: int
) -> None:
    with installed(cuda), torch.inference_mode():
        worker = Worker(cuda, kind)
        worker.serve(prompts, outputs)
    assert worker.published >= sum(length // SIZE for length in prompts)
