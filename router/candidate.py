"""A worker as the router sees it: its last heartbeat, and what the router has sent there since.

Pure: `now` comes in. What is predicted of a worker and is the same for all requests is computed here, once a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from serving.messages import TPOT_BINS_MS, Role, WorkerStatus
from serving.step_cost import StepCost, StepLoad

MOST_PROMPT_SHARE = 0.9  # of a mixed worker's time, when what prompts leave to decodes is predicted


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

    `priority` and `due`, on the router's clock, are what the worker orders its queue by; `seconds` it was predicted to
    take.
    """

    priority: int
    due: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Candidate:
    """`made_at` is when the status was made, on the router's clock; `newer` is what the router has sent since then.

    `leases` are the router's own that are open now, whatever the status says. `busy_until` is when the prompts it has
    are computed, on the router's clock; None: as the status and what is newer say. A `slow` one works, but much longer.
    `queued` are those among its prompts that the router has sent.
    """

    status: WorkerStatus
    newer: Dispatched = NOTHING
    leases: int = 0
    made_at: float = 0.0
    busy_until: float | None = None
    slow: bool = False
    queued: tuple[QueuedPrompt, ...] = ()

    @cached_property
    def prefills(self) -> bool:
        return self.status.role in (Role.PREFILL, Role.MIXED)

    @cached_property
    def decodes(self) -> bool:
        return self.status.role in (Role.DECODE, Role.MIXED)

    @cached_property
    def tag(self) -> int:
        """A number of its own, to tell equal workers apart."""
        return crc32(self.status.name.encode())

    @cached_property
    def queued_tokens(self) -> int:
        """Prompt tokens that are computed before those of a request sent now."""
        return max(0, self.status.waiting_tokens + self.newer.prompt_tokens)

    @cached_property
    def held_leases(self) -> int:
        """Sequences that hold a lease here, of any router."""
        status = self.status
        return max(self.leases, max(status.leases, status.running + status.waiting) + self.newer.leases)

    @cached_property
    def full(self) -> bool:
        """True if it would refuse one more lease: it holds as many as it may, as far as is known."""
        return max(self.leases, self.status.leases + self.newer.leases) >= self.status.max_seqs

    @cached_property
    def owing(self) -> bool:
        """True if other routers hold most of what it may hold: asked though full, it will keep room (decode.turns)."""
        return 2 * self.leases < self.status.max_seqs

    @cached_property
    def free_tokens(self) -> int:
        """Tokens of KV that are neither held nor promised."""
        return max(0, self.status.free_blocks * self.status.block_size - max(0, self.newer.context_tokens))

    @cached_property
    def load(self) -> float:
        """Share of the worker's sequences or of its KV blocks that is taken, whichever is more."""
        status = self.status
        blocks = 1 - self.free_tokens / max(1, self.device_tokens)
        return max(self.held_leases / max(1, status.max_seqs), blocks)

    @cached_property
    def device_tokens(self) -> int:
        """Tokens of KV that the worker's device holds at most."""
        return self.status.total_blocks * self.status.block_size

    @cached_property
    def kind(self) -> tuple[str, int]:
        """Fingerprint and block size: workers of one kind know a block by the same key."""
        return self.status.fingerprint, self.status.block_size

    @property
    def kv_tokens_in_use(self) -> int:
        return (self.status.total_blocks - self.status.free_blocks) * self.status.block_size

    # ---- what its steps take ---------------------------------------------------------------------------------------

    @cached_property
    def cost(self) -> StepCost | None:
        """The model of its steps; None where the worker has none."""
        return self.status.step_cost

    @cached_property
    def decode_load(self) -> StepLoad:
        """A decode step of all sequences that hold a lease. Those that do not run yet count as long as the others."""
        rows, running = self.held_leases if self.decodes else 0, self.status.running
        context = float(self.status.context_tokens + max(0, self.newer.context_tokens))
        if running and rows > running + max(0, self.newer.leases):
            context += self.status.context_tokens / running * (rows - running - max(0, self.newer.leases))
        return StepLoad(rows, context, rows, context)

    @cached_property
    def step_seconds(self) -> float:
        """A decode step of `decode_load`. Ask only where there is a cost."""
        assert self.cost is not None
        return self.cost.seconds(self.decode_load)

    @cached_property
    def prompts_left_at(self) -> float:
        """When the prompts that wait here now are computed, on the router's clock."""
        if self.busy_until is not None:
            return self.busy_until
        return self.made_at + max(0.0, self.status.waiting_seconds + self.newer.prompt_seconds)

    @cached_property
    def prompt_share(self) -> float:
        """The share of its time that goes to steps with prompts."""
        return min(MOST_PROMPT_SHARE, max(0.0, self.status.prompt_share))

    @cached_property
    def tightest_tpot(self) -> float | None:
        """Seconds: the least TPOT objective among its running sequences, None without any. The middle of its bin."""
        bounds = (0.0, *TPOT_BINS_MS)
        for count, (low, high) in zip(self.status.tpot_counts, pairwise(bounds), strict=False):
            if count:
                return (low + high) / 2e3
        return None
