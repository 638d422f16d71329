"""Whose turn it is for the room that comes free, where several routers want it: soft state, a few words a router.

Pure; `now` comes in. It knows sessions by name, and neither what a lease takes nor whether there is room.
"""

from __future__ import annotations

from collections.abc import Mapping

CLAIM_SECONDS = 0.6  # a router that still wants room asks again sooner (router.fleet.RECHECK_SECONDS)
MORE = 2  # times as many leases as another


class RouterTurns:
    """A router learns of the room that its own leases leave before others do, and would take it again and again.

    So a session that was refused has a claim for a moment: none that holds more than MORE times as much, and one lease,
    is granted anything before it. Where all hold about as much nobody waits, and no room is kept free. What
    gives way claims nothing from what it gives way to (decode.giving_way).
    """

    def __init__(self) -> None:
        self._claims: dict[str, float] = {}  # by session: until when
        self._yielding: dict[str, tuple[float, int]] = {}  # the same of what gives way, and its priority

    @property
    def claimed(self) -> bool:
        """False if no session has been refused of late: whoever asks may go."""
        return bool(self._claims or self._yielding)

    def refused(self, session: str, now: float, *, yielding: int | None = None) -> None:
        """There was no room for what it wanted, which gives way to others; `yielding` is its priority if it does."""
        if yielding is None:
            self._claims[session] = now + CLAIM_SECONDS
        else:
            self._yielding[session] = now + CLAIM_SECONDS, yielding

    def settled(self, session: str) -> None:
        """It has been granted a lease, or is gone."""
        self._claims.pop(session, None)
        self._yielding.pop(session, None)

    def others_first(self, session: str, held: Mapping[str, int], now: float, *, pressing: int | None = None) -> bool:
        """True if another's claim goes before a lease for this session; `held` are leases by session.

        `pressing` is the priority of a lease that others give way to, if they are no more important.
        """
        self._claims = {name: until for name, until in self._claims.items() if until > now}
        self._yielding = {name: claim for name, claim in self._yielding.items() if claim[0] > now}
        before = [name for name, (_, priority) in self._yielding.items() if pressing is None or priority < pressing]
        mine = held.get(session, 0)
        return any(name != session and mine > MORE * held.get(name, 0) + 1 for name in (*self._claims, *before))
