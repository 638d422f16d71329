"""Holds tokens back on the simulated wire that nobody acts on: those between a text's second and its last.

They come together just before the last, or before the error in its place; so no task has its turn for each of them, and
nothing that is decided or measured changes. It knows neither routers nor workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from serving.joined_delta import JoinedDelta
from serving.links import Deliver, LeaseEvent
from serving.messages import Delta


@dataclass(kw_only=True, slots=True)
class HeldDelta(JoinedDelta):
    """The last of the tokens was there `came_at` on the virtual clock."""

    came_at: float


class HeldTokens:
    """One session's way from its worker to its router. `later` calls back after the message's `seconds`.

    The first message of an attempt, its second token, passes: routers measure handoffs by it. `untold` are the tokens
    that the worker itself has kept to tell later, and that would be there by now.
    """

    def __init__(
        self,
        deliver: Deliver,
        seconds: float,
        clock: Callable[[], float],
        later: Callable[..., object],
    ):
        self.deliver = deliver
        self.seconds = seconds
        self.clock = clock
        self.later = later
        self.untold: Callable[[], Sequence[LeaseEvent]] = tuple
        self._held: dict[str, HeldAttempt] = {}  # by lease

    def send(self, events: Sequence[LeaseEvent]) -> None:
        """What a step of the worker has brought."""
        due, attempts, told = self.clock() + self.seconds, self._held, list[LeaseEvent]()
        for event in events:
            lease, delta = event.lease, event.delta
            held = attempts.get(lease)
            if held is not None and held.epoch != event.epoch:
                held = None
            if delta is not None and delta.finish is None:
                if held is not None:
                    held.deltas.append(delta)
                    held.dues.append(due)
                    continue
                attempts[lease] = HeldAttempt(lease, event.epoch)
            elif held is not None:
                del attempts[lease]
                told += held.release()
            told.append(event)
        if not told:
            return
        if self.seconds:
            self.later(self.seconds, self.deliver, told)
        else:
            self.deliver(told)

    def flush(self) -> None:
        """Deliver what has come by now: the router counts it, or gives the worker up. The rest is still on its way."""
        now = self.clock()
        for held in self._held.values():
            if events := held.release(upto=now):
                self.deliver(events)
        if kept := self.untold():
            self.deliver(kept)

    def forget(self, lease: str) -> None:
        """The router has left the lease."""
        self._held.pop(lease, None)


class HeldAttempt:
    """Tokens of one attempt, and when those of each step are there. No token's scores may be asked for."""

    __slots__ = ("deltas", "dues", "epoch", "lease")

    def __init__(self, lease: str, epoch: int):
        self.lease = lease
        self.epoch = epoch
        self.deltas: list[Delta] = []
        self.dues: list[float] = []

    def release(self, upto: float = inf) -> list[LeaseEvent]:
        """All that is there by then in one event, or none; what comes later is still held."""
        steps = bisect_right(self.dues, upto)
        deltas, self.deltas = self.deltas[:steps], self.deltas[steps:]
        dues, self.dues = self.dues[:steps], self.dues[steps:]
        if not deltas:
            return []
        together = HeldDelta(
            index=deltas[0].index,
            tokens=tuple([token for delta in deltas for token in delta.tokens]),
            cached_tokens=deltas[0].cached_tokens,
            steps=sum([delta.steps for delta in deltas]),
            came_at=dues[-1],
        )
        return [LeaseEvent(self.lease, self.epoch, together)]
