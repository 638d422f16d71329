"""A worker as the router sees it: its last heartbeat, and what the router has sent there since.

Pure: `now` comes in. What is predicted of a worker and is the same for all requests is computed here, once a change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

from router.arrivals import Arrivals
from serving.messages import TPOT_BINS_MS, Role, WorkerStatus
from serving.step_cost import StepCost, StepLoad

UNHURRIED = 10.0  # seconds after which a prompt without a TTFT objective is taken to be due (prefill.ordering),
AGE = 30.0  # and of waiting that raise a prompt there by STEP
STEP = 100  # priorities
MOST_PROMPT_SHARE = 0.9  # of a mixed worker's time, when what prompts leave to decodes is predicted

_OBJECTIVES = [sum(bounds) / 2e3 for bounds in pairwise((0.0, *TPOT_BINS_MS))]  # seconds: the middle of each bin


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Work sent to a worker, or taken from it where numbers are negative: leases, and prompts to be computed."""

    leases: int = 0
    context_tokens: int = 0  # that the leases hold
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # predicted for those

    def __add__(self, other: Dispatched) -> Dispatched:
        return Dispatched(
            self.leases + other.leases,
            self.context_tokens + other.context_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_seconds + other.prompt_seconds,
        )

    def __neg__(self) -> Dispatched:
        return Dispatched(-self.leases, -self.context_tokens, -self.prompt_tokens, -self.prompt_seconds)


NOTHING = Dispatched()


class QueuedPrompt(NamedTuple):
    """A prompt that the router has sent to a worker and that has no first token yet.

    `priority` and `due`, on the router's clock, are what the worker orders its queue by; `due` is infinite without a
    TTFT objective. `seconds` it was predicted to take were it the only one, of which it adds `share` to the queue: less
    than 1 where prompts share steps. `at` is when it was sent, None of one that is not yet.
    """

    priority: int
    due: float
    seconds: float
    at: float | None = None
    share: float = 1.0


@dataclass(eq=False, slots=True)
class Candidate:
    """`made_at` is when the status was made, on the router's clock; `newer` is what the router has sent since then.

    `leases` are the router's own that are open now, whatever the status says. `busy_until` is when the prompts it has
    are computed, on the router's clock; None: as the status and what is newer say. A `slow` one works, but much longer.
    `queued` are those among its prompts that the router has sent. `decoding` is the share of its leases that have
    decoded over the last seconds, the others waiting for their prompts. `arrivals` are prompts like those whose first
    tokens have lately come from it in time.

    It is never changed but by keeping what was once computed of it. Every choice reads hundreds of these, few of which
    are new: so what follows is computed at once, and kept in slots.
    """

    status: WorkerStatus
    newer: Dispatched = NOTHING
    leases: int = 0
    made_at: float = 0.0
    busy_until: float | None = None
    slow: bool = False
    queued: tuple[QueuedPrompt, ...] = ()
    decoding: float = 1.0
    arrivals: tuple[Arrivals, ...] = ()

    instance: str = field(init=False)
    prefills: bool = field(init=False)
    decodes: bool = field(init=False)
    draining: bool = field(init=False)
    max_model_len: int = field(init=False)  # tokens
    tag: int = field(init=False)  # a number of its own, to tell equal workers apart
    generation: str = field(init=False)  # of workers that hand KV to each other
    kind: tuple[str, int] = field(init=False)  # workers of one kind know a block by the same key
    queued_tokens: int = field(init=False)  # prompt tokens that are computed before those of a request sent now
    held_leases: int = field(init=False)  # sequences that hold a lease here, of any router
    full: bool = field(init=False)  # it would refuse one more lease: it holds as many as it may, as far as is known
    device_tokens: int = field(init=False)  # of KV that its device holds at most
    free_tokens: int = field(init=False)  # of KV that are neither held nor promised
    load: float = field(init=False)  # share of its sequences or of its KV blocks that is taken, whichever is more
    cost: StepCost | None = field(init=False)  # the model of its steps; None where it has none
    token_seconds: float = field(init=False)  # of a prompt's token, by that model; 0 where there is no cost
    decode_load: StepLoad = field(init=False)  # a decode step of all sequences that hold a lease
    step_seconds: float = field(init=False)  # that step; 0 where there is no cost
    prompts_left_at: float = field(init=False)  # when the prompts that wait now are computed, on the router's clock
    prompt_share: float = field(init=False)  # of its time that goes to steps with prompts
    strangers: bool = field(init=False)  # more prompts waited there than the router had sent: others have some, too
    prompt_steps: dict[float | None, Any] = field(init=False, default_factory=dict)  # router.prompt_steps, by objective
    _objectives: tuple[tuple[float, int], ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        status, newer = self.status, self.newer
        self.instance = status.instance
        self.prefills = status.role in (Role.PREFILL, Role.MIXED)
        self.decodes = status.role in (Role.DECODE, Role.MIXED)
        self.draining, self.max_model_len = status.draining, status.max_model_len
        self.tag = crc32(status.name.encode())
        self.generation = status.generation
        self.kind = status.fingerprint, status.block_size
        self.queued_tokens = max(0, status.waiting_tokens + newer.prompt_tokens)
        self.held_leases = max(self.leases, max(status.leases, status.running + status.waiting) + newer.leases)
        self.full = max(self.leases, status.leases + newer.leases) >= status.max_seqs
        self.device_tokens = status.total_blocks * status.block_size
        self.free_tokens = max(0, status.free_blocks * status.block_size - max(0, newer.context_tokens))
        blocks = 1 - self.free_tokens / max(1, self.device_tokens)
        self.load = max(self.held_leases / max(1, status.max_seqs), blocks)
        self.cost, self.decode_load = status.step_cost, self._decode_load()
        self.token_seconds = self.cost.token if self.cost is not None else 0.0
        self.step_seconds = self.cost.seconds(self.decode_load) if self.cost is not None else 0.0
        left_at, waits = self.busy_until, status.waiting_seconds + newer.prompt_seconds
        self.prompts_left_at = left_at if left_at is not None else self.made_at + max(0.0, waits)
        self.prompt_share = min(MOST_PROMPT_SHARE, max(0.0, status.prompt_share))
        sent = sum(prompt.at is not None and prompt.at <= self.made_at for prompt in self.queued)
        self.strangers = status.waiting > sent

    def _decode_load(self) -> StepLoad:
        """Sequences that do not run yet count as long as the others, and by the share of leases that decode."""
        rows, running = self.held_leases if self.decodes else 0, self.status.running
        waiting, promised = max(0, rows - running), max(0, self.newer.leases)
        context = float(max(0, self.newer.context_tokens))
        if running and waiting > promised:
            context += self.status.context_tokens / running * (waiting - promised)
        expected = min(rows, running) + round(self.decoding * waiting)
        context = self.status.context_tokens + self.decoding * context
        return StepLoad(expected, context, expected, context)

    @property
    def owing(self) -> bool:
        """True if other routers hold most of what it may hold: asked though full, it will keep room (decode.turns)."""
        return 2 * self.leases < self.status.max_seqs

    @property
    def kv_tokens_in_use(self) -> int:
        return (self.status.total_blocks - self.status.free_blocks) * self.status.block_size

    @property
    def objectives(self) -> tuple[tuple[float, int], ...]:
        """Seconds and how many: the TPOT objectives of its running sequences, the tightest first. Middles of bins."""
        if self._objectives is None:
            counted = zip(_OBJECTIVES, self.status.tpot_counts, strict=False)
            self._objectives = tuple((seconds, count) for seconds, count in counted if count)
        return self._objectives

    @property
    def tightest_tpot(self) -> float | None:
        """Seconds: the least TPOT objective among its running sequences, None without any."""
        known = self._objectives if self._objectives is not None else self.objectives
        return known[0][0] if known else None
