"""Which requests break the workers that compute them, and when one is given to no other. Pure; `now` comes in.

A worker may die by itself, or be killed, with any request. So a loss counts against a request only where

- the worker says that its engine died in a step of this request, or it was lost while it computed the request, and no
  more than PROGRESS tokens had come of that try: a text that gets on is broken off by its worker, not the other way;
- the worker is dead: it has not been heard since. A broken connection to a worker that lives is the link's;
- the request had been sent to it;
- it was no drain, nor the end of a worker that drained, and no move that was planned.

A request that two losses count against, one right after the other, is given to no third worker if no other request may
have broken both. Where others may, it is tried alone, one of them at a time; a third loss ends it in any case.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.registry import Registry
from router.request_state import Death, RequestState
from serving.errors import BESIDE_STEP, IN_STEP, NEVER_SENT, MillraceError

PROGRESS = 16  # tokens of one try: a request that comes so far did not break its worker at once
SUSPECTED = 2  # losses in a row from which on a request is held back
MOST_BROKEN = 3
MOST_REMEMBERED = 256  # lost workers


class Verdict(Enum):
    """What becomes of a request that has lost its worker."""

    FREE = "free"  # it goes on like any other
    OPEN = "open"  # whether a worker is dead is not known yet
    ALONE = "alone"  # it goes on while none of those goes on that may have broken the same workers
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Lost:
    """A lost worker: the requests it held, those that may have broken it, and how many its last heartbeat told of."""

    told: int
    held: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)


class Quarantine:
    """Remembers who was where when workers were lost. One for all requests of a router."""

    def __init__(self, registry: Registry):
        self.registry = registry
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    def tried(self, state: RequestState) -> None:
        """A try has ended without its request, for whatever reason."""
        if state.attempts and state.attempts[-1].tokens > PROGRESS:
            state.deaths.clear()

    def lost(self, state: RequestState, instance: str, error: MillraceError, now: float, *, computing: bool) -> None:
        """A try has ended with its worker's loss. `computing`: the worker may have begun with the request."""
        if error.code == NEVER_SENT:
            return
        entry = self.registry.get(instance)
        known = self._lost.get(instance)
        if known is None:
            status = entry.status if entry is not None else None
            told = max(status.leases, status.running + status.waiting) if status is not None else 0
            known = self._lost[instance] = _Lost(told)
            while len(self._lost) > MOST_REMEMBERED:
                self._lost.popitem(last=False)
        name = state.request.request_id
        known.held.add(name)
        in_step = error.code == IN_STEP
        computing = computing and not (entry is not None and entry.status.draining)  # its platform ended it
        short = not state.attempts or state.attempts[-1].tokens <= PROGRESS
        if in_step or (computing and short and error.code != BESIDE_STEP):
            known.suspects.add(name)
            state.deaths.append(Death(instance, entry.status.name if entry is not None else instance, now, in_step))

    def verdict(self, state: RequestState, now: float) -> Verdict:
        """Of a request that has lost its worker; ask again while it is open."""
        state.deaths = [death for death in state.deaths if not self._lives(death)]
        if len(state.deaths) < SUSPECTED:
            return Verdict.FREE
        if not all(self._dead(death, now) for death in state.deaths):
            return Verdict.OPEN
        if len(state.deaths) < MOST_BROKEN and self._in_company(state):
            return Verdict.ALONE
        return Verdict.QUARANTINED

    def _lives(self, death: Death) -> bool:
        """True if the worker was heard after it was thought lost."""
        entry = self.registry.get(death.instance)
        return not death.in_step and entry is not None and entry.made_at >= death.at

    def _dead(self, death: Death, now: float) -> bool:
        """True if it is: it said so, is silent for so long, is forgotten, or has begun another life."""
        if death.in_step or now - death.at >= self.registry.silence or self.registry.get(death.instance) is None:
            return True
        others = (entry.status for entry in self.registry.workers.values())
        return any(other.name == death.name and other.instance != death.instance for other in others)

    def _in_company(self, state: RequestState) -> bool:
        """True if another request may have broken all these workers: one of ours, or some of other routers."""
        lost = [known for death in state.deaths if (known := self._lost.get(death.instance)) is not None]
        return bool(_common(lost) - {state.request.request_id}) or all(each.told > len(each.held) for each in lost)


def _common(lost: Sequence[_Lost]) -> set[str]:
    return set.intersection(*(each.suspects for each in lost)) if lost else set()
