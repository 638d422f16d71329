"""Plans new placements in a process of its own: seconds of Python would hold up the steps of a rank beside them.

It is started for the first plan and kept for the next: to start one holds up the other threads of this process too.
`python -m serving.expert_parallel.planner DESCRIPTOR` is that process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from serving.channel import Channel, ChannelClosed, ChannelLate
from serving.child_process import helper_environ, module_command
from serving.expert_parallel.replanning import BalancePolicy, LayerCommit, replanned
from serving.expert_parallel.stages import SlotChange
from serving.model.expert_balance import ExpertPlacement

PLANNING_SECONDS = 300.0
LOOK_SECONDS = 0.1
TELLING_SECONDS = 10.0  # that one who listens may take to read
LISTENING = b""  # the first word of the process
NICE = 10  # the process gives way to those that serve


class PlanningFailed(Exception):
    """There is no plan this time; the next may succeed."""


class PlanningProcess:
    """One after the other asks it for plans. Close it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def planned(
        self,
        placements: Sequence[ExpertPlacement],
        loads: NDArray[np.float64],
        policy: BalancePolicy,
        look: Callable[[], object] = lambda: None,
    ) -> bytes:
        """The commits of `replanned`, for loads [L, E], as `unpacked` reads them. Raises PlanningFailed.

        `look` is called every LOOK_SECONDS; what it raises ends the process.
        """
        answered = False
        try:
            channel = self._channel or self._started(look)
            channel.send((list(placements), loads.tolist(), policy), TELLING_SECONDS)
            answer = _answer(channel, look)
            answered = True
        except (ChannelClosed, ChannelLate) as error:
            raise PlanningFailed("the process that plans has ended, or is late") from error
        finally:
            if not answered:
                self.close()
        return answer

    def _started(self, look: Callable[[], object]) -> Channel:
        """A process that listens. What is said before that must fit into its socket: it may start for a while."""
        channel, theirs = Channel.pair()
        with theirs:
            self._channel = channel
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                (
                    *("nice", "-n", str(NICE)),
                    *module_command("serving.expert_parallel.planner"),
                    str(theirs.fileno()),
                ),
                pass_fds=(theirs.fileno(),),
                env=helper_environ(os.environ),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the leader, which closes it
            )
        _answer(channel, look)
        return channel

    def close(self) -> None:
        """End the process. Safe to repeat; another plan starts the next."""
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()


def _answer(channel: Channel, look: Callable[[], object]) -> bytes:
    """Raises ChannelClosed, and ChannelLate after PLANNING_SECONDS."""
    until = time.monotonic() + PLANNING_SECONDS
    while True:
        try:
            word: bytes = channel.receive(LOOK_SECONDS)
            return word
        except ChannelLate:
            if time.monotonic() >= until:
                raise
            look()


def packed(commits: Sequence[LayerCommit]) -> bytes:
    """As an array [N, 5] int64 of commit number, layer, rank, slot, expert."""
    rows = [
        (number, commit.layer, change.rank, change.slot, change.expert)
        for number, commit in enumerate(commits)
        for change in commit.stage
    ]
    return np.array(rows, dtype=np.int64).tobytes()


def unpacked(stored: bytes) -> list[LayerCommit]:
    rows = np.frombuffer(stored, dtype=np.int64).reshape(-1, 5).tolist()
    return [
        LayerCommit(layer, tuple(SlotChange(*row[2:]) for row in stage))
        for (_, layer), stage in groupby(rows, key=lambda row: (row[0], row[1]))
    ]


def main() -> None:
    """Plans until nobody listens any more."""
    with closing(Channel(socket.socket(fileno=int(sys.argv[1])))) as channel, suppress(ChannelClosed, ChannelLate):
        channel.send(LISTENING, TELLING_SECONDS)
        while True:
            placements, loads, policy = channel.receive(None)
            channel.send(packed(replanned(placements, loads, policy)), TELLING_SECONDS)


if __name__ == "__main__":
    main()
