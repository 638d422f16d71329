"""What happens to leases in a step, put together for one message to each router.

It knows neither tables nor doors; the engine may keep tokens to tell them later, which then come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from decode.leases import Lease
from serving.errors import MillraceError
from serving.links import Deliver, LeaseEvent
from serving.messages import Delta


class Listening(Protocol):
    """A session."""

    deliver: Deliver


class LeaseEvents:
    """Events by session. `kept`: the engine has tokens that it tells later.

    If it has none, a sequence's tokens beyond those told are of a step that its thread still accounts for, or stand for
    tokens that are not known yet: they are nobody's.
    """

    def __init__(self, *, kept: bool):
        self.kept = kept
        self._events: dict[str, list[LeaseEvent]] = {}

    def add(self, lease: Lease, delta: Delta | None, error: MillraceError | None = None) -> None:
        """Tokens, or what ends the lease after those that are not told yet."""
        fence, sent = lease.fence, self._events.setdefault(lease.session, [])
        if self.kept and delta is None and (before := lease.seq.untold()) is not None:
            sent.append(LeaseEvent(fence.lease, fence.epoch, before))
        sent.append(LeaseEvent(fence.lease, fence.epoch, delta, error))

    def send(self, sessions: Mapping[str, Listening]) -> None:
        """Those of a session that is gone are dropped."""
        for name, sent in self._events.items():
            if name in sessions:
                sessions[name].deliver(sent)


def untold(leases: Iterable[Lease], but: int) -> list[LeaseEvent]:
    """The tokens that the engine has kept to tell later, `but` the last so many of each lease."""
    found = [(lease.fence, lease.seq.untold(but=but)) for lease in leases]
    return [LeaseEvent(fence.lease, fence.epoch, delta) for fence, delta in found if delta is not None]
