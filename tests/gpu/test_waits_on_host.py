"""Ranks on devices whose steps wait for the device in between: the host waits for each exchange there, so that what it
waits for afterwards never waits for another rank.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.expert_parallel.exchange import RankLost
from serving.forward.forward import EagerForward
from serving.forward.layer_events import LayerDone
from serving.loader.loading import load
from serving.parallel.joining import ParallelRank
from serving.rank_group.device_messages import MakeForward, RunOnDevice
from serving.rank_group.device_rank import DeviceRank
from serving.rank_group.parts import pack
from tests.gpu.fake_cuda import installed
from tests.gpu.fake_graphs import GraphingCuda
from tests.gpu.fake_nccl import FakeNccl
from tests.gpu.test_device_groups import FakeRank
from tests.serving.rank_group.groups import BLOCK
from tests.serving.rank_group.test_device_group import BATCH
from tests.tiny import tiny_llama

SECONDS = 60.0


@pytest.mark.parametrize("waits", [True, False])
def test_an_exchange_is_done_when_the_host_goes_on(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, each a thread. Without it the device has not begun, and what is read would wait for the other."""
    cuda, store = GraphingCuda(), HashStore()
    monkeypatch.setattr("serving.parallel.device_groups.time.sleep", lambda _: cuda.finish())
    with installed(cuda):
        nccl = FakeNccl(cuda, 2)
        ranks = [FakeRank(nccl, number, store) for number in range(2)]

        def exchanged(number: int) -> bool:
            rank = ranks[number]
            if waits:
                rank.joined.wait_on_host()
            with cuda.on(nccl.ranks[number].computing):
                rank.collective.gathered(cuda.tensor(torch.full((3,), float(number))))
            return all(meeting.done.done for meeting in nccl.meetings)

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(exchanged, range(2), timeout=SECONDS))
        assert found == [True, True] if waits else not any(found)
        assert [len(list(rank.collective.passed())) for rank in ranks] == [0 if waits else 1] * 2


def test_a_rank_that_does_not_come_is_lost_in_the_middle_of_a_step() -> None:
    """Before: whatever then waited for the device, as attention by torch does, had no end."""
    cuda, store = GraphingCuda(), HashStore()
    with installed(cuda):
        nccl = FakeNccl(cuda, 2)
        rank = FakeRank(nccl, 0, store, deadline=0.3)
        rank.joined.wait_on_host()
        with cuda.on(nccl.ranks[0].computing):
            for _ in range(2):
                with pytest.raises(RankLost) as lost:
                    rank.collective.gathered(cuda.tensor(torch.zeros(3)))
                assert lost.value.rank == 1


class Told:
    """A rank's groups (ParallelRank), which say what they are told."""

    device, bytes_sent = torch.device("cpu"), 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def wait_on_host(self) -> None:
        self.told.append("waits")

    def abort(self) -> None:
        self.told.append("aborted")

    def finish(self, step: object) -> None:
        self.told.append("finished")


class Losing(EagerForward):
    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> torch.Tensor:
        raise RankLost(0, "its process has ended")


def test_a_rank_whose_steps_are_computed_by_torch_waits_on_the_host_and_ends_what_a_lost_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its device waits for has no end by itself: its process could not leave."""
    told = Told()
    loaded = load(tiny_llama(tmp_path), "float32")
    rank = DeviceRank(loaded, cast(ParallelRank, told))
    kept: Any = type("Kept", (), {"planes": [(torch.zeros(1, BLOCK, 1, 8),) * 2] * loaded.spec.layers})
    order = MakeForward(keep=lambda _: kept, config=EngineConfig(kernels="torch"), max_position=64)
    assert rank.make(order).error is None and told.told == ["waits"]
    monkeypatch.setattr(rank, "forward", Losing(loaded.model, kept.planes))
    with pytest.raises(RankLost):
        rank.run(RunOnDevice(number=1, batch=pack(BATCH), head=True, launched=False))
    assert told.told == ["waits", "aborted"]
