"""Process groups of ranks on devices: NCCL moves bytes between them, ordered by streams, and the host waits for none of
it. So a step with exchanges in it can be captured in a CUDA graph; where a rank is lost, the step's end never comes.

It knows no layouts and no models.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, Work

from serving.expert_parallel.all_to_all import AllToAllGroup
from serving.expert_parallel.bounded import BoundedStore
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.waits import POLL, BoundedWaits
from serving.streams import Event, Streams, recorded

# A lost rank is ours to tell: torch's own watch over NCCL would end the process, and its monitor as well.
OWN_WATCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
NEVER = timedelta(days=365)


class DeviceGroup(AllToAllGroup, Protocol):
    """What is needed of a process group whose operations go to streams of a device (ProcessGroupNCCL).

    `Work.wait()` of such an operation lets the thread's current stream wait for it, and returns.
    """

    def abort(self) -> None:
        """Let everything that is under way end, whatever it has moved. The group is of no use after that."""


class StreamWaits:
    """Waits of a group on a device (collective.Waits): what is launched behind an operation finds it done.

    The host learns of a lost rank at the end of a step (joining.ParallelRank.finish), and here from then on; or at each
    operation, once it waits for them.
    """

    def __init__(self, bounded: BoundedWaits, streams: Streams) -> None:
        self._bounded, self._streams = bounded, streams
        self._on_host = False
        self._passing: deque[Event] = deque()  # behind each operation that was launched, in the stream's order

    def check(self) -> None:
        self._bounded.check()

    def begin(self, start: Callable[[], Work]) -> Work:
        return self._bounded.begin(start)

    def finish(self, work: Work) -> None:
        self._bounded.begin(partial(_awaited, work))
        if self._streams.capturing():
            return  # a replay is one thing to wait for, however many operations are in it
        if self._on_host:
            self._bounded.until(partial(passed, recorded(self._streams)))
            return
        while self._passing and self._passing[0].query():
            self._passing.popleft()
        self._passing.append(recorded(self._streams))

    def wait_on_host(self) -> None:
        self._on_host = True

    def passed(self) -> Iterator[Event]:
        """Places of the stream that are to be passed before its end, first to last; asked for one by one."""
        while self._passing:
            yield self._passing.popleft()


def passed(place: Event) -> bool:
    """True once the device has passed it, False after a moment: it spins meanwhile, as at the end of any step."""
    until = time.monotonic() + POLL.total_seconds()
    while not place.query():
        if time.monotonic() >= until:
            return False
        time.sleep(0)  # other threads may go on
    return True


def _awaited(work: Work) -> Work:
    """Lets the current stream wait; raises RuntimeError where the group was aborted."""
    work.wait()
    return work


def connected_by_nccl(store: Store, rank: int, ranks: int, seconds: float) -> DeviceGroup:
    """A group over NCCL, on this process's current CUDA device. Nothing is exchanged yet.

    Raises ValueError where torch has no NCCL, RankLost where the others do not come within the time, StoreUnavailable
    for a store that does not answer.
    """
    if not distributed.is_nccl_available():
        raise ValueError(f"torch {torch.__version__} has no NCCL: ranks on CUDA devices need it")
    from torch._C._distributed_c10d import ProcessGroupNCCL  # CPU builds of torch have none

    os.environ.update(OWN_WATCH)
    nccl: Any = ProcessGroupNCCL

    def made(asked: Store) -> Any:
        options = nccl.Options()
        options._timeout = NEVER
        return nccl(asked, rank, ranks, options)

    try:
        return cast(DeviceGroup, BoundedStore(store).ask(made, seconds))
    except RuntimeError as error:
        raise RankLost(None, f"no connection within the deadline: {error}") from error
