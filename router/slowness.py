"""Which workers are slow: they work, but take much longer for the same than they used to, or than others of their kind.

Pure; what workers report and `now` come in. What becomes of a slow worker the policies decide: they rank it behind.

Compared are steps of one reference load, as each worker's own model has them (serving.step_cost): that model follows
the machine's present pace. Workers of one kind have the same role and layout of KV. What a worker takes is held against
the median of the others, and what it takes against what it used to, as far as the others do not take longer too. It is
slow once it has been so for SUSTAINED seconds, and no longer once it has been quick again for as long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from serving.messages import Role, WorkerStatus
from serving.step_cost import StepCost, StepLoad

SLOW = 2.0  # times what it used to take, or others do, from which on a worker is slow
QUICK = 1.4  # below which it is quick again
SUSTAINED = 5.0  # seconds
SETTLED = 64  # steps that a model is fitted to before it is believed
ROWS, CONTEXT = 8, 512  # the reference load: sequences that decode, and tokens of each; of a prompt, tokens before
CHUNK = 256  # and computed
FORGETS, LEARNS = 600.0, 60.0  # seconds in which what it used to take comes halfway to what it takes: up, and down

Kind = tuple[Role, str]


@dataclass(slots=True)
class _Pace:
    """Seconds of the reference load, now and as they used to be; `since` when they speak against what `slow` says."""

    kind: Kind
    seconds: float
    usual: float
    at: float
    slow: bool = False
    since: float | None = None
    factor: float = 1.0


class SlowWatch:
    """`heard` for each heartbeat, `judge` about once a second."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def heard(self, status: WorkerStatus, now: float) -> None:
        """Take a report in."""
        cost = status.step_cost
        if cost is None or cost.samples < SETTLED:
            self._paces.pop(status.instance, None)
            return
        seconds, known = reference_seconds(status, cost), self._paces.get(status.instance)
        if known is None:
            self._paces[status.instance] = _Pace((status.role, status.fingerprint), seconds, seconds, now)
            return
        half_life = FORGETS if seconds > known.usual else LEARNS
        known.usual += (1.0 - 0.5 ** (max(0.0, now - known.at) / half_life)) * (seconds - known.usual)
        known.seconds, known.at = seconds, now

    def judge(self, now: float) -> Iterator[tuple[str, bool]]:
        """The workers, by instance, that have become slow (True) or quick again (False)."""
        by_kind: dict[Kind, list[_Pace]] = {}
        for pace in self._paces.values():
            by_kind.setdefault(pace.kind, []).append(pace)
        peers = {kind: _Peers(paces) for kind, paces in by_kind.items()}
        for instance, pace in self._paces.items():
            pace.factor = peers[pace.kind].slowdown(pace)
            against = pace.factor < QUICK if pace.slow else pace.factor >= SLOW
            if not against:
                pace.since = None
            elif pace.since is None:
                pace.since = now
            elif now - pace.since >= SUSTAINED:
                pace.slow, pace.since = not pace.slow, None
                yield instance, pace.slow

    def slow(self, instance: str) -> bool:
        pace = self._paces.get(instance)
        return pace is not None and pace.slow

    def factor(self, instance: str) -> float:
        """How much longer it takes than it used to, or than others; 1 where nothing is known."""
        pace = self._paces.get(instance)
        return pace.factor if pace is not None else 1.0

    def told(self, instance: str) -> str:
        """For a log."""
        if not self.slow(instance):
            return "as quick again as others, and as it used to be"
        return f"slow: its steps take {self.factor(instance):.1f} times as long as others', or as they used to"

    def retain(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        for instance in [each for each in self._paces if each not in known]:
            del self._paces[instance]


class _Peers:
    """The workers of one kind: what each of them takes, against all the others."""

    def __init__(self, paces: Sequence[_Pace]):
        self._seconds = sorted(pace.seconds for pace in paces)
        self._changes = sorted(pace.seconds / pace.usual for pace in paces)

    def slowdown(self, pace: _Pace) -> float:
        """How much longer it takes than the median of the others, or than it used to and they did not; the larger."""
        change = pace.seconds / pace.usual
        if len(self._seconds) == 1:
            return change
        common = median_beside(self._changes, change)
        return max(pace.seconds / median_beside(self._seconds, pace.seconds), change / max(1.0, common))


def median_beside(ordered: Sequence[float], one: float) -> float:
    """The median of numbers in order, at least two, without `one` of them."""
    at, others = bisect_left(ordered, one), len(ordered) - 1

    def other(place: int) -> float:
        return ordered[place + (place >= at)]

    return (other((others - 1) // 2) + other(others // 2)) / 2


def reference_seconds(status: WorkerStatus, cost: StepCost) -> float:
    """A step of this kind of worker's usual work: a chunk of a prompt, or a decode of a few sequences."""
    if status.role is Role.PREFILL:
        return cost.seconds(StepLoad.of(CONTEXT, CHUNK))
    return cost.seconds(StepLoad(ROWS, ROWS * CONTEXT, ROWS, ROWS * CONTEXT))
