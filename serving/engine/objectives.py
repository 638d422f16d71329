"""What a sequence is due and when, on the clock of the engine that computes it. Plain arithmetic.

It knows neither batches nor queues: schedulers compare these times and decide. What a request does not ask for is
infinite here, so that comparisons need no cases.
"""

from __future__ import annotations

from math import inf

from serving.messages import LeaseOrder

DEADLINE_PASSED = "the request's deadline has passed"


class Objectives:
    """A sequence's objectives. Seconds on the engine's clock; `tpot` seconds a token.

    due       when its next token is due, as the router sees it; set once, on arrival
    ends      its deadline: computed no further afterwards
    priority  smaller goes first
    missed    True once its first token has come too late: whatever follows, the request has missed its objectives
    """

    __slots__ = ("due", "ends", "missed", "origin", "priority", "tpot")

    def __init__(self, due: float = inf, ends: float = inf, tpot: float = inf, priority: int = 0):
        self.due = due
        self.ends = ends
        self.tpot = tpot
        self.priority = priority
        self.missed = False
        self.origin = inf  # when a token would be due that follows none; infinite where no token is due at a time

    @staticmethod
    def of(order: LeaseOrder, now: float) -> Objectives:
        """The objectives of an order that has come `now`."""
        due, ends, tpot = order.first_token_in, order.ends_in, order.request.slo.tpot_ms
        return Objectives(
            inf if due is None else now + due,
            inf if ends is None else now + ends,
            inf if tpot is None else tpot / 1e3,
            order.request.priority,
        )

    @property
    def stated(self) -> bool:
        """True if anything is to be decided by them beside the order of arrival."""
        return self.priority != 0 or self.due < inf or self.tpot < inf

    def begin(self, tokens: int, generated: int, drawn: float) -> None:
        """It has `tokens` tokens, the last drawn at `drawn`, after `generated` output tokens it came with.

        From here on each token is due TPOT after the one before: TPOT is the mean after the first token. A text that
        goes on is measured from where the router says its next token was due. Where the first token has come too late
        no other is due at any time.
        """
        if generated and self.due < inf:
            drawn = self.due
        else:
            self.missed = drawn > self.due
        self.origin = inf if self.missed or self.tpot == inf else drawn - (tokens - 1) * self.tpot

    def slack(self, tokens: int, now: float) -> float:
        """Seconds until the token after `tokens` tokens is due; below 0 once it is late. Infinite before `begin`."""
        return self.origin + tokens * self.tpot - now

    def late(self, tokens: int, now: float) -> bool:
        """True if it has missed its objectives, as far as can be said with so many tokens."""
        return self.missed or self.slack(tokens, now) < 0.0
