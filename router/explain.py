"""Why requests went where they went, and what became of them: a bounded memory of recent ones, and counts by class.

Pure: it is told of requests as they begin, are placed and end. It knows neither HTTP nor metrics, only who listens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from router.offered import OfferedWork
from router.request_state import Attempt, RequestState
from serving.errors import MillraceError
from serving.timeline import Moment

CAPACITY = 8 << 20  # bytes of explanations
MOST_ATTEMPTS = 16  # told of a request: its last ones
OTHER = "other"  # class of requests whose own is not configured

COMPLETED, REFUSED, FAILED, ABORTED, INVALID = "completed", "refused", "failed", "aborted", "invalid"
OUTCOMES = (COMPLETED, REFUSED, FAILED, ABORTED, INVALID)


class PlacementObserver(Protocol):
    """Takes what is found out here, for metrics. `code` is an error's, or empty."""

    def placed(self, *, reason: str, downgraded: bool) -> None: ...
    def ended(self, *, service_class: str, outcome: str, within_slo: bool, code: str) -> None: ...
    def degraded(self, *, service_class: str) -> None:
        """A request that ended has gone on without its objectives."""

    def predicted(self, *, ttft: float | None, tpot: float | None) -> None:
        """Observed by predicted, of one placement; None where there is nothing to compare."""


@dataclass(slots=True)
class ClassCounts:
    """Of one service class, since the router began. What is offered is all but what was `invalid`."""

    within_slo: int = 0
    tokens: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    work: OfferedWork = field(default_factory=OfferedWork)


class ExplainLog:
    """`classes` are those that are counted by name; `capacity` is in bytes, the requests that ended first go first."""

    def __init__(
        self, classes: Collection[str], observer: PlacementObserver | None = None, capacity: int = CAPACITY
    ) -> None:
        self.counts = {name: ClassCounts() for name in (*classes, OTHER)}
        self.observer = observer
        self.capacity = capacity
        self.held = 0  # bytes
        self._running: dict[str, RequestState] = {}
        self._ended: OrderedDict[str, tuple[Mapping[str, str] | None, bytes]] = OrderedDict()  # where, and JSON

    def __len__(self) -> int:
        return len(self._ended)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def began(self, state: RequestState) -> None:
        self._running[state.request.request_id] = state
        self._counts(state).work.arrives(state)

    def placed(self, state: RequestState) -> None:
        """Its prefill was sent, as its last attempt says."""
        attempt = state.attempts[-1]
        if self.observer is not None:
            self.observer.placed(reason=attempt.decision.reason, downgraded=attempt.downgraded)

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """Once for each that began. `error` is what left the router, None where nothing did."""
        name = state.request.request_id
        if self._running.get(name) is state:
            del self._running[name]
        outcome, within = outcome_of(state, error), within_slo(state)
        within = within and outcome == COMPLETED
        counts = self._counts(state)
        counts.outcomes[outcome] += 1
        counts.within_slo += within
        counts.tokens += len(state.generated)
        _account(counts.work, state, outcome)
        self._tell_observer(state, error, outcome, within)
        who = _who(state) if state.attempts else None
        # A copy: what orjson returns holds 8 KiB however short it is.
        self._keep(name, who, bytes(memoryview(orjson.dumps(told(state, outcome, error)))))

    def _counts(self, state: RequestState) -> ClassCounts:
        return self.counts.get(state.request.service_class) or self.counts[OTHER]

    def _tell_observer(self, state: RequestState, error: BaseException | None, outcome: str, within: bool) -> None:
        if self.observer is None:
            return
        code = (error.code or type(error).__name__) if isinstance(error, MillraceError) else ""
        named = state.request.service_class
        named = named if named in self.counts else OTHER
        self.observer.ended(service_class=named, outcome=outcome, within_slo=within, code=code)
        if state.degraded:
            self.observer.degraded(service_class=named)
        for attempt in state.attempts:
            predicted, actual = attempt.decision.predicted, attempt.ttft
            if predicted is None:
                continue
            ttft = actual / predicted.ttft if actual is not None and predicted.ttft > 0 else None
            usual = predicted.usual_tpot or 0.0
            tpot = attempt.tpot / usual if attempt.tpot is not None and usual > 0 else None
            self.observer.predicted(ttft=ttft, tpot=tpot)

    def _keep(self, name: str, who: Mapping[str, str] | None, explained: bytes) -> None:
        self.held += len(explained) - len(self._ended.pop(name, (None, b""))[1])
        self._ended[name] = who, explained
        while self.held > self.capacity:
            self.held -= len(self._ended.popitem(last=False)[1][1])

    # ---- what is asked ---------------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        """All that is known of a request, as JSON has it; None if it is forgotten."""
        state = self._running.get(request_id)
        explained = self._ended[request_id][1] if request_id in self._ended else None
        if state is not None:
            explained = orjson.dumps(told(state, "running", None))
        found: Mapping[str, Any] | None = orjson.loads(explained) if explained is not None else None
        return found

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        """Names of the workers that compute it now, or did at last, and why; None if it has found none."""
        state = self._running.get(request_id)
        if state is not None:
            return _who(state) if state.attempts else None
        return self._ended[request_id][0] if request_id in self._ended else None


def _account(work: OfferedWork, state: RequestState, outcome: str) -> None:
    """What became of it. A client that left says nothing of whether its objectives would have been met."""
    if outcome == INVALID:
        work.arrives(state, -1)
        return
    if outcome == COMPLETED or (outcome == ABORTED and state.generated):
        work.answers(state)
    if outcome != ABORTED:
        work.judges(state, served=outcome == COMPLETED)


def outcome_of(state: RequestState, error: BaseException | None) -> str:
    """How it ended. Whoever leaves between two tokens has found a stop string.

    Whoever is cancelled has hung up, or has been ended at its deadline.
    """
    if state.finished or (isinstance(error, GeneratorExit) and state.generated):
        return COMPLETED
    if isinstance(error, MillraceError):
        handed_back = error.status == 429 and not state.failures  # by a worker that had no time for it, or no room
        if error.status in (429, 503) and not state.generated and (handed_back or not state.attempts):
            return REFUSED
        return INVALID if error.status < 429 else FAILED
    late = state.request.deadline is not None and state.timeline.events[-1][1] >= state.request.deadline
    return FAILED if late or isinstance(error, Exception) else ABORTED


def within_slo(state: RequestState) -> bool:
    """True if what came has met both objectives so far. TPOT is the mean after the first token."""
    slo, timeline = state.asked.slo, state.timeline
    ttft, tpot = timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN), timeline.tpot
    early = slo.ttft_ms is None or (ttft is not None and ttft * 1e3 <= slo.ttft_ms)
    return early and (slo.tpot_ms is None or tpot is None or tpot * 1e3 <= slo.tpot_ms)


def told(state: RequestState, outcome: str, error: BaseException | None) -> dict[str, Any]:
    """A request in what orjson writes: plain data, and dataclasses of those. Seconds; no token and no text."""
    request, timeline = state.asked, state.timeline
    failure = f"{type(error).__name__}: {error.message}" if isinstance(error, MillraceError) else None
    return {
        "id": request.request_id,
        "outcome": outcome,
        "error": failure,
        "service_class": request.service_class,
        "priority": request.priority,
        "objectives": {"ttft_ms": request.slo.ttft_ms, "tpot_ms": request.slo.tpot_ms},
        "degraded": state.degraded,
        "within_slo": None if outcome == "running" else outcome == COMPLETED and within_slo(state),
        "prompt_tokens": len(request.prompt),
        "output_tokens": len(state.generated),
        "queued_seconds": timeline.between(Moment.ARRIVED, Moment.LEASED),
        "ttft_seconds": timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN),
        "tpot_seconds": timeline.tpot,
        "total_seconds": timeline.between(Moment.ARRIVED, Moment.FINISHED),
        "passed_over": [{"worker": worker, "error": why} for worker, why in state.passed_over],
        "attempts": [_attempt(attempt) for attempt in state.attempts[-MOST_ATTEMPTS:]],
    }


def _who(state: RequestState) -> dict[str, str]:
    """Of its last attempt, and what is less than was asked for."""
    return {**_where(state.attempts[-1]), "degraded": "slo" if state.degraded else ""}


def _where(attempt: Attempt) -> dict[str, str]:
    decision = attempt.decision
    return {
        "prefill": decision.prefill.status.name if decision.prefill is not None else "",
        "decode": decision.decode.status.name if decision.decode is not None else "",
        "reason": decision.reason,
        "downgrade": "mixed" if attempt.downgraded else "",
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    predicted, transfer = attempt.decision.predicted, None
    if attempt.decision.split and attempt.first_at is not None and attempt.second_at is not None:
        step = predicted.step if predicted is not None else 0.0
        transfer = max(0.0, attempt.second_at - attempt.first_at - step)
    return {
        **_where(attempt),
        "error": attempt.error,
        "predicted": predicted,
        "actual": {
            "queue": attempt.queue_seconds,
            "prefill": attempt.compute_seconds,
            "transfer": transfer,
            "ttft": attempt.ttft,
            "tpot": attempt.tpot,
        },
        "cached_tokens": _cached(attempt),
        "output_tokens": attempt.tokens,
        "considered": attempt.decision.considered,
    }


def _cached(attempt: Attempt) -> dict[str, int | None]:
    """Tokens that the prefill worker was thought to hold, and did not compute: by where they were.

    `decode` are those that another worker, which decodes, held already, so that they were not handed over.
    """
    actual, fetched = attempt.cached_tokens, attempt.fetched_tokens
    return {
        "expected": attempt.expected_cached,
        "actual": actual,
        "device": None if actual is None else actual - fetched,
        "pool": None if actual is None else fetched,
        "decode": attempt.leased_tokens,
    }
