"""One request on its way through the router: what is known of its text, and what its tries have come to.

Plain state; `now` comes in. It knows neither workers nor how they are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from zlib import crc32

from router.policy import Decision
from router.text_kinds import repetition
from serving.errors import MillraceError
from serving.messages import Build, Delta, LeaseId, LeaseOrder, Prefilled, Request, Slo
from serving.service_class import DEGRADED_PRIORITY
from serving.timeline import Moment, Timeline

MOST_PASSED_OVER = 32


@dataclass(slots=True)
class Attempt:
    """One decision and what has come of it so far; seconds on the router's clock."""

    decision: Decision
    began_at: float  # the prefill was sent
    expected_cached: int = 0  # tokens that the prefill worker was thought to hold
    downgraded: bool = False  # a worker computes the prompt of its own decode, although two were asked for
    queue_seconds: float | None = None  # as the prefill worker says: until the prompt's first step,
    compute_seconds: float | None = None  # and from there to its first token
    cached_tokens: int | None = None  # at the prefill worker, and of those
    fetched_tokens: int = 0  # what came from the KV pool
    leased_tokens: int = 0  # that another worker held when it gave the lease: they are not handed over
    error: str | None = None  # that ended it, where it failed
    first_at: float | None = None  # its first token came
    second_at: float | None = None  # the first that was decoded
    last_at: float = 0.0
    tokens: int = 0
    steps: int = 0  # that have brought tokens after the first

    def take(self, tokens: int, now: float, steps: int = 1) -> None:
        self.steps += steps if self.first_at is not None else 0
        if self.first_at is None:
            self.first_at = now
        elif self.second_at is None:
            self.second_at = now
        self.tokens, self.last_at = self.tokens + tokens, now

    def begin(self, prefilled: Prefilled) -> None:
        """The first token has come, and what the worker says of it."""
        self.queue_seconds, self.compute_seconds = prefilled.queue_seconds, prefilled.compute_seconds
        self.cached_tokens, self.fetched_tokens = prefilled.cached_tokens, prefilled.fetched_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds from the prefill's sending to the first token."""
        return None if self.first_at is None else self.first_at - self.began_at

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first; None before there are a few of them."""
        if self.first_at is None or self.tokens < 4:
            return None
        return (self.last_at - self.first_at) / (self.tokens - 1)

    @property
    def step_tokens(self) -> float | None:
        """Tokens that each decode step has brought; None before there are a few of them."""
        return None if self.tpot is None else (self.tokens - 1) / self.steps


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that was lost while it computed the request, `at` on the router's clock."""

    instance: str
    name: str
    at: float
    in_step: bool  # as the worker itself says: its engine died in a step of this request


@dataclass(slots=True, kw_only=True)
class RequestState:
    """`generated` are the output tokens the client has; `build` is what wrote them, None before a worker is chosen."""

    request: Request
    generated: list[int] = field(default_factory=list)
    build: Build | None = None
    timeline: Timeline = field(default_factory=Timeline)
    last: Delta | None = None
    failures: int = 0  # tries that broke since a worker last decoded for it; planned moves are not counted
    deaths: list[Death] = field(default_factory=list)  # one right after the other (router.quarantine)
    attempts: list[Attempt] = field(default_factory=list)  # the last is the present one
    passed_over: list[tuple[str, str]] = field(default_factory=list)  # workers that gave no lease, and why
    promised: Request | None = None  # as it was before it went on without its objectives
    sheddable: bool = False  # late, it is refused by its class, or goes on without its objectives
    admitted: bool = False  # to a queue, at some time
    handed_back: bool = False  # a worker has ended it so: once is enough
    split_asked: bool = False  # prefill and decode by two workers was decided at some time
    block_keys: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)  # by fingerprint and block size
    waited: float = 0.0  # seconds for places, since its text last got on
    charged: int | None = None  # its output tokens when its tenant was last charged for a place
    repeats: int = field(init=False)  # how much the prompt repeats itself (router.text_kinds)

    def __post_init__(self) -> None:
        self.repeats = repetition(self.request.prompt)

    @property
    def asked(self) -> Request:
        """The request as it came, with the objectives it is judged by."""
        return self.promised or self.request

    @property
    def degraded(self) -> bool:
        """True if it goes on without its objectives, behind all others."""
        return self.promised is not None

    def degrade(self) -> None:
        """It is late at its best placement: from now on nothing is ordered or limited by them."""
        self.promised = self.request
        self.request = replace(self.request, slo=Slo(), priority=max(DEGRADED_PRIORITY, self.request.priority))

    @property
    def salt(self) -> int:
        """A number of its own, the same at every try."""
        return crc32(self.request.request_id.encode())

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.generated]

    @property
    def required_build(self) -> Build | None:
        """What has to go on with the text; None while it has none."""
        return self.build if self.generated else None

    @property
    def failed_generation(self) -> str:
        """Where the last try has broken, if none has brought a token; empty: nowhere."""
        worker = self.attempts[-1].decision.prefill if self.attempts else None
        return worker.generation if worker is not None and self.failures and not self.generated else ""

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish is not None

    def first_token_in(self, now: float) -> float | None:
        """Seconds until the next token is due: the first by the TTFT objective, a later one by TPOT.

        None without an objective. The n-th token after the first is due n times TPOT after that: the objective is on
        the mean.
        """
        slo, first = self.request.slo, self.timeline.first(Moment.FIRST_TOKEN)
        if first is not None:
            return None if slo.tpot_ms is None else first + len(self.generated) * slo.tpot_ms / 1e3 - now
        arrived = self.timeline.first(Moment.ARRIVED)
        return None if slo.ttft_ms is None or arrived is None else arrived + slo.ttft_ms / 1e3 - now

    def pressing(self, now: float) -> bool:
        """True if late leases give their room to it: it goes on with a text, or has time left for its first token."""
        left = self.first_token_in(now)
        return bool(self.generated) or (left is not None and left > 0.0)

    def late(self, now: float) -> bool:
        """True if its first token can only come too late for its TTFT objective."""
        left = self.first_token_in(now)
        return not self.generated and left is not None and not left > 0.0

    @property
    def in_time(self) -> bool:
        """True if its first token has come within the TTFT objective, where it has one."""
        ttft, limit = self.timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN), self.request.slo.ttft_ms
        return ttft is not None and (limit is None or ttft * 1e3 <= limit)

    def pass_over(self, worker: str, error: MillraceError) -> None:
        """The worker was the best, and had no lease to give."""
        if len(self.passed_over) < MOST_PASSED_OVER:
            self.passed_over.append((worker, type(error).__name__))

    def fail(self, error: MillraceError) -> None:
        """The present attempt has failed, if one has begun and has not failed before."""
        if self.attempts and self.attempts[-1].error is None:
            self.attempts[-1].error = f"{type(error).__name__}: {error.message}"

    def order(self, fence: LeaseId, now: float, *, prefill: bool = False) -> LeaseOrder:
        deadline = self.request.deadline
        return LeaseOrder(
            lease=fence,
            request=self.request,
            generated=tuple(self.generated),
            first_token_in=self.first_token_in(now),
            ends_in=None if deadline is None else deadline - now,
            prefill=prefill,
            sheddable=self.sheddable,
        )

    def take(self, delta: Delta, now: float) -> Delta:
        """The delta has come: its tokens are part of the text from now on."""
        if self.timeline.last_token is None:
            self.timeline.note(Moment.FIRST_TOKEN, now)
        self.timeline.last_token = now
        if self.attempts:
            self.attempts[-1].take(len(delta.tokens), now, delta.steps)
        self.timeline.tokens += len(delta.tokens)
        self.generated += delta.tokens
        self.last = delta
        return delta
