"""What a router says of its work (GET /v1/workers), and the differences between two such answers.

Pure: it reads plain data and no clock. An answer that lacks something is refused, never filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from router.offered import OfferedWork
from serving.errors import Unavailable
from serving.messages import Role
from serving.step_cost import StepCost

MOST = 1e15  # of anything: what a sound router tells is less
TOTALS = tuple(field.name for field in fields(OfferedWork))


class MetricsMissing(Unavailable):
    """The router's answer lacks what a decision needs, or is not of the same life as the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSeen:
    """A worker as the router knows it. `cost` is None before its first step; `busy` the share of time spent in steps.

    Tokens; seconds. `busy` is None where it is not known of both ends of an interval.
    """

    name: str
    role: Role
    state: str
    heard_seconds: float
    running: int
    leases: int
    max_seqs: int
    queued_tokens: int
    kv_usage: float
    steps_seconds: float
    cost: StepCost | None
    kv_tokens: int
    max_batched_tokens: int
    busy: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSample:
    """One answer: totals since the router began, and its workers. `at` is on the router's clock."""

    at: float
    tokens: int
    waiting: int
    waiting_tokens: int
    work: Mapping[str, OfferedWork]
    workers: tuple[WorkerSeen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An interval of `seconds` that ended `at`, on the autoscaler's clock: what was offered in it, by service class.

    `tokens` are output tokens that were served in it; `waiting` requests and their prompt tokens wait for room at its
    end.
    """

    at: float
    seconds: float
    tokens: int
    waiting: int
    waiting_tokens: int
    work: Mapping[str, OfferedWork]
    workers: tuple[WorkerSeen, ...]

    @property
    def offered(self) -> OfferedWork:
        """Over all classes."""
        return total(self.work.values())


def read_sample(answer: Any) -> RouterSample:
    """Raises MetricsMissing for an answer that lacks something, or has what cannot be in its place."""
    try:
        return RouterSample(
            at=_figure(answer["at"]),
            tokens=_count(answer["tokens"]),
            waiting=_count(answer["requests_waiting"]),
            waiting_tokens=_count(answer["waiting_tokens"]),
            work={name: _work(each["work"]) for name, each in answer["classes"].items()},
            workers=tuple(_worker(each) for each in answer["workers"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MetricsMissing(f"the router's answer lacks {error}: it may be of an older version") from error


def _figure(told: Any) -> float:
    """Raises TypeError, ValueError for what is no figure of a router's."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        raise TypeError(f"a number where it has {told!r}")
    if not 0 <= told < MOST:
        raise ValueError(f"a possible number where it has {told!r}")
    return told


def _count(told: Any) -> int:
    return int(_figure(told))


def _word(told: Any) -> str:
    if not isinstance(told, str):
        raise TypeError(f"a word where it has {told!r}")
    return told


def _work(totals: Mapping[str, Any]) -> OfferedWork:
    found: dict[str, Any] = {name: _figure(totals[name]) for name in TOTALS}
    return OfferedWork(**found)


def _worker(told: Mapping[str, Any]) -> WorkerSeen:
    measured = told["measured"]
    return WorkerSeen(
        name=_word(told["name"]),
        role=Role(told["role"]),
        state=_word(told["state"]),
        heard_seconds=_figure(told["heard_seconds"]),
        running=_count(told["running"]),
        leases=_count(told["leases"]),
        max_seqs=_count(told["max_seqs"]),
        queued_tokens=_count(told["queued_tokens"]),
        kv_usage=_figure(told["kv_usage"]),
        steps_seconds=_figure(told["steps_seconds"]),
        cost=_cost(measured["cost"]) if measured is not None else None,
        kv_tokens=_count(measured["kv_tokens"]) if measured is not None else 0,
        max_batched_tokens=_count(measured["max_num_batched_tokens"]) if measured is not None else 0,
    )


def _cost(told: Mapping[str, Any]) -> StepCost:
    found: dict[str, Any] = {name: _figure(value) for name, value in told.items()}
    cost = StepCost(**found)
    if not cost.possible:
        raise ValueError(f"possible step costs where it has {told!r}")
    return cost


def observed(before: RouterSample, now: RouterSample, at: float) -> Observation:
    """What happened between two samples; `at` is when the second came, on the autoscaler's clock.

    Raises MetricsMissing where the router has begun anew between them, or has said the same twice.
    """
    seconds = now.at - before.at
    if seconds <= 0:
        raise MetricsMissing("the router's clock has not gone on")
    if now.tokens < before.tokens or set(before.work) - set(now.work):
        raise MetricsMissing("the router has begun anew")
    earlier = {worker.name: worker for worker in before.workers}
    return Observation(
        at=at,
        seconds=seconds,
        tokens=now.tokens - before.tokens,
        waiting=now.waiting,
        waiting_tokens=now.waiting_tokens,
        work={name: since(before.work.get(name), each) for name, each in now.work.items()},
        workers=tuple(_with_busy(worker, earlier.get(worker.name), seconds) for worker in now.workers),
    )


def since(before: OfferedWork | None, now: OfferedWork) -> OfferedWork:
    """What has come to the totals. Raises MetricsMissing where those of answers have become less."""
    if before is None:
        return now
    if now.answered < before.answered:
        raise MetricsMissing("the router has begun anew")
    return OfferedWork(**{name: max(0, getattr(now, name) - getattr(before, name)) for name in TOTALS})


def _with_busy(worker: WorkerSeen, before: WorkerSeen | None, seconds: float) -> WorkerSeen:
    """Heartbeats lie within an interval anyhow, so the share may come out a little above 1."""
    if before is None or before.role != worker.role or worker.steps_seconds < before.steps_seconds:
        return worker
    return replace(worker, busy=min(1.0, (worker.steps_seconds - before.steps_seconds) / seconds))


def total(work: Iterable[OfferedWork]) -> OfferedWork:
    """The sum of several totals."""
    parts = list(work)
    if len(parts) == 1:
        return parts[0]
    return OfferedWork(**{name: sum(getattr(each, name) for each in parts) for name in TOTALS})


def merged(observations: Sequence[Observation]) -> Observation:
    """Observations one after the other, at least one, as one: sums of what was offered, and the last one's workers."""
    last = observations[-1]
    names = dict.fromkeys(name for each in observations for name in each.work)
    return Observation(
        at=last.at,
        seconds=sum(each.seconds for each in observations),
        tokens=sum(each.tokens for each in observations),
        waiting=last.waiting,
        waiting_tokens=last.waiting_tokens,
        work={name: total(each.work[name] for each in observations if name in each.work) for name in names},
        workers=last.workers,
    )
