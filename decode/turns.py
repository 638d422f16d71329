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
    is granted anything before it. Where all hold about as much nobody waits, and no room is kept free. What is `late`
    claims nothing from those that others give way to (decode.giving_way): their room would not have been its own.
    """

    def __init__(self) -> None:
        self._claims: dict[str, float] = {}  # by session: until when
        self._late: dict[str, float] = {}  # the same of late ones

    @property
    def claimed(self) -> bool:
        """False if no session has been refused of late: whoever asks may go."""
        return bool(self._claims or self._late)

    def refused(self, session: str, now: float, *, late: bool = False) -> None:
        """There was no room for what it wanted."""
        (self._late if late else self._claims)[session] = now + CLAIM_SECONDS

    def settled(self, session: str) -> None:
        """It has been granted a lease, or is gone."""
        self._claims.pop(session, None)
        self._late.pop(session, None)

    def others_first(self, session: str, held: Mapping[str, int], now: float, *, pressing: bool = False) -> bool:
        """True if another's claim goes before a lease for this session; `held` are leases by session."""
        self._claims = {name: until for name, until in self._claims.items() if until > now}
        self._late = {name: until for name, until in self._late.items() if until > now}
        mine, claims = held.get(session, 0), self._claims if pressing else self._claims | self._late
        return any(name != session and mine > MORE * held.get(name, 0) + 1 for name in claims)
