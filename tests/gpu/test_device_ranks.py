"""The Triton path of two ranks on devices that do their work late: its exchanges are inside its graphs, and no graph is
replayed once a rank is lost.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import HashStore

from serving.batch.ragged import RaggedBatch
from serving.engine.runner import ModelRunner
from serving.expert_parallel.exchange import RankLost
from serving.forward.cuda_graphs import GraphSizes
from serving.model.decoder import Decoder
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout
from serving.rank_group.parts import TENSORS, pack, unpack
from serving.streams import recorded
from tests.gpu.fake_cuda import DEVICE, installed
from tests.gpu.fake_graphs import GraphingCuda, counting_triton
from tests.gpu.fake_nccl import FakeNccl
from tests.gpu.late_forward import SPEC, device_pool
from tests.gpu.test_device_groups import FakeRank

WEIGHTS, EXPERTS = ParallelLayout(tensor=2), ParallelLayout(sequence=2, spread_experts=True)


@dataclasses.dataclass(frozen=True)
class SharedForward:
    """A rank, and its TritonForward with a graph for two sequences."""

    rank: FakeRank
    forward: Any


def shared_forwards(
    cuda: GraphingCuda,
    nccl: FakeNccl,
    store: Store,
    deadline: float = 60.0,
    layout: ParallelLayout = WEIGHTS,
) -> list[SharedForward]:
    """Of an 8B, or as many mixtures, that two ranks share, warmed up one after the other: nothing is computed yet."""
    from serving.forward.triton_forward import TritonForward, supports
    from tests.gpu.triton_counts import SHAPE, SIZE, SPARSE, on_device

    found: list[SharedForward] = []
    for number in range(2):
        model = Decoder(SPARSE if layout.spread_experts else SHAPE)
        rank = FakeRank(nccl, number, store, deadline, layout)
        hold_share(model, layout, number)
        apply_parallel(on_device(model, cuda), rank.joined)
        planes = device_pool(cuda, model.spec.kv_layers("float32"), 8, SIZE).planes
        assert supports(model, "float32", planes[0]) is None
        with cuda.on(nccl.ranks[number].computing):
            found.append(SharedForward(rank, TritonForward(model, planes, 64)))
            found[-1].forward.warm_up(8, GraphSizes(sequences=(2,), contexts=(64,)))
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
@pytest.mark.parametrize(("layout", "exchanges"), [(WEIGHTS, 2 * 32 + 2), (EXPERTS, 4 * 32 + 1)])
def test_a_decode_step_of_two_ranks_is_one_replay_with_its_exchanges_inside(
    layout: ParallelLayout, exchanges: int
) -> None:
    """Of 32 layers through the Triton path, no wait. Two sums a layer, the embedding's, and the logits; or in each
    layer heads for rows, and rows to experts, both ways, and at last all rows.
    """
    from tests.gpu.triton_counts import SIZE

    cuda, store = GraphingCuda(), HashStore()
    nccl = FakeNccl(cuda, 2)
    with counting_triton(cuda), torch.inference_mode():
        forwards = [one.forward for one in shared_forwards(cuda, nccl, store, layout=layout)]
        cuda.finish()
        before, launched = cuda.counts.copy(), [rank.launched for rank in nccl.ranks]
        for rank, forward in enumerate(forwards):
            with cuda.on(nccl.ranks[rank].computing):
                batch = RaggedBatch.build(
                    tokens=[[1], [2]], starts=[3, 17], block_tables=[[0], [1, 2]], block_size=SIZE, device=DEVICE
                )
                forward.greedy(batch, None)
        cuda.finish()
        counts = cuda.counts - before
    assert [rank.launched - first for rank, first in zip(nccl.ranks, launched, strict=True)] == [exchanges] * 2
    assert sum(count for counted, count in counts.items() if counted.what == "replay") == 2
    assert not any(counted.what.startswith("wait") for counted in counts)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")
def test_no_graph_is_replayed_once_a_rank_is_lost() -> None:
    """Before: its exchanges asked nobody, and went to a group that had been aborted."""
    from tests.gpu.triton_counts import SIZE

    cuda, store = GraphingCuda(), HashStore()
    nccl = FakeNccl(cuda, 2)
    with counting_triton(cuda), torch.inference_mode():
        first, _ = shared_forwards(cuda, nccl, store, deadline=0.3)
        with cuda.on(nccl.ranks[0].computing):
            batch = RaggedBatch.build(
                tokens=[[1], [2]], starts=[3, 17], block_tables=[[0], [1, 2]], block_size=SIZE, device=DEVICE
            )
            first.forward.greedy(batch, None)  # the other launches nothing
            with pytest.raises(RankLost) as lost:
                first.rank.joined.finish(recorded(cuda))
            assert lost.value.rank == 1
            replays = cuda.total("replay")
            for compute in (first.forward.greedy, first.forward.logits, first.forward.hidden):
                with pytest.raises(RankLost) as lost:
                    compute(batch, None)
                assert lost.value.rank == 1
        assert cuda.total("replay") == replays == 1


@pytest.mark.parametrize(("error", "waits"), [(RankLost(1, "gone"), 0), (RuntimeError("a mistake"), 1)])
def test_a_step_that_loses_a_rank_is_not_waited_for(
    error: Exception, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the engine's thread waited for a device that may never come to the step's end."""
    cuda = GraphingCuda()

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, "_run", failing)
    with installed(cuda):
        runner = ModelRunner(cast(Any, None), SPEC, 16, DEVICE)
        with pytest.raises(type(error)):
            runner.run([], None)
    assert cuda.total("wait: event") == waits


def test_a_batch_is_sent_to_the_other_ranks_as_it_was_built() -> None:
    """It lies in host memory anyway: no copy comes back from the device, and none is waited for."""
    cuda = GraphingCuda()
    named: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4]],
        "starts": [0, 17],
        "block_tables": [[0], [1, 2]],
        "block_size": 16,
        "long_rope": [False, True],
    }
    with installed(cuda):
        sent = pack(RaggedBatch.build(**named, device=DEVICE))
        came = unpack(sent, DEVICE)
        assert cuda.total("copy") == 2 and not any(counted.what.startswith("wait") for counted in cuda.counts)
        cuda.finish()
        wanted = RaggedBatch.build(**named)
        for name in TENSORS:
            assert torch.equal(cuda.peek(getattr(came, name)), getattr(wanted, name)), name
    assert came.query_lens == (3, 1) and came.context_lens_list == (3, 18)
    assert wanted.arrays is None, "on a CPU tensors and arrays are the same"
