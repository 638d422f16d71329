"""Why requests missed their objectives: where their time went, as the client and the server's explanations tell it.

Pure: an outcome and an answer of GET /v1/requests/{id}/explain in, seconds by part out. It sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sse import Outcome
from bench.summary import SloTargets

SEND = "send"
PARTS = (SEND, "client", "queue", "retries", "link", "prefill queue", "prefill")
REFUSED, FAILED, TPOT, UNEXPLAINED = "refused", "failed", "decode", "first token"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """Of one request that came `at` seconds after the beginning: seconds by part of its TTFT, and seconds a token.

    send           before that: from when it was to be sent until it was, by a client that was late
    client         of its TTFT, what neither router nor worker saw: HTTP, and both event loops
    queue          until the router had a lease for it
    retries        from its first lease until the attempt that brought the first token began
    link           of the attempt, what the worker did not count: calls between router and worker
    prefill queue  until the worker's first step with it
    prefill        from there to its first token
    """

    at: float
    kind: str
    id: str
    error: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    placement: str = ""
    passed_over: int = 0  # leases that workers refused it

    def missed(self, slo: SloTargets) -> str | None:
        """Why it missed its objectives, by the largest part of what came too late; None where it met them."""
        if self.error is not None:
            return REFUSED if self.error in ("HTTP 429", "HTTP 503") else FAILED
        if slo.ttft_ms is not None and self.ttft is not None and self.ttft * 1e3 > slo.ttft_ms:
            told = [part for part in self.parts if part != SEND]
            return max(told, key=self.parts.__getitem__) if told else UNEXPLAINED
        return TPOT if slo.tpot_ms is not None and (self.tpot or 0.0) * 1e3 > slo.tpot_ms else None


def time_spent(outcome: Outcome, told: Mapping[str, Any] | None, at: float) -> TimeSpent:
    """`told` is the server's explanation of the request, None where there is none."""
    good = outcome.error is None
    parts = {SEND: outcome.sent - outcome.scheduled}
    sequence = told["sequences"][0] if told is not None else {}
    attempts = [each for each in sequence.get("attempts", ()) if each["actual"]["ttft"] is not None]
    if good and attempts and sequence["ttft_seconds"] is not None:
        first, actual = attempts[0], attempts[0]["actual"]
        computed = {"prefill queue": actual["queue"] or 0.0, "prefill": actual["prefill"] or 0.0}
        parts |= computed | {
            "client": outcome.ttft - sequence["ttft_seconds"],
            "queue": sequence["queued_seconds"] or 0.0,
            "link": actual["ttft"] - sum(computed.values()),
        }
        parts["retries"] = sequence["ttft_seconds"] - parts["queue"] - actual["ttft"]
        prefill, decode = first["prefill"], first["decode"]
        placement = decode if prefill == decode else f"{prefill} → {decode}"
    else:
        placement = ""
    return TimeSpent(
        at=at,
        kind=outcome.kind,
        id=outcome.id,
        error=outcome.error,
        ttft=outcome.ttft if good else None,
        tpot=outcome.tpot if good else None,
        parts=parts,
        placement=placement,
        passed_over=len(sequence.get("passed_over", ())),
    )


def counted(spent: Sequence[TimeSpent], slo: SloTargets) -> dict[str, int]:
    """How many missed, by why; the most frequent first."""
    why: dict[str, int] = {}
    for one in spent:
        if (reason := one.missed(slo)) is not None:
            why[reason] = why.get(reason, 0) + 1
    return dict(sorted(why.items(), key=lambda each: -each[1]))
