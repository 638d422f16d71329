"""What ranks are asked beside their steps: the leader's lanes to all of them, and what a rank does by one.

A lane is used by one thread at a time, so as many things are done at once as there are lanes. It does not know what the
words mean, nor what a rank does them with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from serving.channel import Channel, ChannelClosed, ChannelLate
from serving.errors import MISTAKES
from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankLine
from serving.rank_group.loading import ANSWER_SECONDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoneBeside:
    """What was asked by a lane is done; or `error` says what was raised over it, and the rank goes on."""

    error: str | None = None


class LaneToRanks:
    """One connection to each of the other ranks. `number` is its own among the lanes."""

    def __init__(self, number: int, lines: Sequence[RankLine], seconds: float) -> None:
        self.number, self._lines, self._seconds = number, lines, seconds

    def together(self, ranks: Collection[int], word: object, own: Callable[[], object]) -> None:
        """Have these of the other ranks do `word`, while `own` is done here. All is done when it returns.

        Raises RankLost, and RuntimeError with what was raised in a rank.
        """
        asked: list[RankLine] = []
        answers: list[tuple[int, DoneBeside]] = []
        try:
            for line in self._lines:
                if line.rank in ranks:
                    line.ask(word, self._seconds)
                    asked.append(line)
            own()
        finally:  # a lane that is used again has no answers that nobody has heard
            answers += ((line.rank, line.answer(DoneBeside, self._seconds)) for line in asked)
        for rank, answer in answers:
            if answer.error is not None:
                raise RuntimeError(f"rank {rank}: {answer.error}")


class Lanes:
    """A leader's. `seconds` a rank may take to answer; `on_lost` is told of one that does not, on any thread."""

    def __init__(
        self, lanes: Sequence[Sequence[RankLine]], seconds: float, on_lost: Callable[[RankLost], object]
    ) -> None:
        self._on_lost = on_lost
        self._lost: RankLost | None = None
        self.count = len(lanes)
        self._free: SimpleQueue[LaneToRanks] = SimpleQueue()
        for number, lines in enumerate(lanes):
            self._free.put(LaneToRanks(number, lines, seconds))

    @contextmanager
    def one(self) -> Iterator[LaneToRanks]:
        """A lane of one's own; waits until one is free: neither on the event loop nor under a lock.

        Raises RankLost, always once it has: a rank that was late may still be at what it was asked.
        """
        lane = self._free.get()
        try:
            if self._lost is not None:
                raise self._lost
            yield lane
        except RankLost as lost:
            if self._lost is None:
                self._lost = lost
                self._on_lost(lost)
            raise
        finally:
            self._free.put(lane)


def serve_lane(lane: Channel, does: Callable[[Any], object]) -> None:
    """Do what the leader says by a lane until it closes it."""
    with suppress(ChannelClosed, ChannelLate):
        while True:
            lane.send(_answer(lane.receive(None), does), ANSWER_SECONDS)


def _answer(word: Any, does: Callable[[Any], object]) -> DoneBeside:
    try:
        does(word)
    except MISTAKES as error:
        log.exception("a mistake over %s", type(word).__name__)
        return DoneBeside(f"{type(error).__name__}: {error}")
    return DoneBeside()
