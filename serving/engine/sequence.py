"""One sequence as a worker holds it: its tokens, how much of its KV is computed, and the blocks that hold it.

Plain state, guarded by the engine's lock. No torch, no clock.

    tokens    prompt, then output; the KV of tokens[:computed] is in `blocks`, what `offload` names apart
    start     tokens the sequence was opened with; output beyond them was made here
    told      tokens that whoever waits for them has been told of, the first of the output among them
    most      tokens it may come to, whatever the worker's model allows
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Protocol, overload

from serving.batch.layer_barrier import LayerBarrier
from serving.engine.objectives import Objectives
from serving.engine.offload import OffloadState
from serving.engine.proposed import ProposerState
from serving.errors import BESIDE_STEP, IN_STEP, MillraceError
from serving.joined_delta import JoinedDelta
from serving.kvspec import AUTO
from serving.messages import Delta, FinishReason, LeaseOrder, Request, TokenLogprob

if TYPE_CHECKING:
    from serving.grammar.grammars import GrammarState
    from serving.sampling.penalties import PenaltyState
    from serving.sampling.pooling import PooledState


class LayerSink(Protocol):
    """Takes each layer's KV once it is computed (kvcache.handoff.sender)."""

    def layer_done(self, layer: int, upto: int) -> None:
        """The layer's KV of the sequence's first `upto` tokens is computed. Called on the worker's event loop."""


class ArrivingKV(Protocol):
    """KV of a sequence's first tokens on its way into its blocks. Called under the worker's lock."""

    @property
    def barrier(self) -> LayerBarrier: ...

    def enter(self) -> None:
        """A step begins that computes what comes after: until it leaves, all of it counts as computed."""

    def leave(self) -> None:
        """The step has left the barrier: only what is there counts."""


class OutputView(Sequence[int]):
    """tokens[start:], without a copy."""

    __slots__ = ("start", "tokens")

    def __init__(self, tokens: list[int], start: int):
        self.tokens = tokens
        self.start = start

    def __len__(self) -> int:
        return len(self.tokens) - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens[self.start :])  # token by token through __getitem__ takes a hundred times as long

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self.tokens[self.start :][index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"output token {index} of {len(self)}")
        return self.tokens[index + self.start if index >= 0 else index]


@dataclass(slots=True)
class PrefixKeys:
    """Names of the sequence's blocks by content, owned by the KV manager (kvcache.blocks.prefix)."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    published: int = 0  # leading blocks that others may share


@dataclass(slots=True)
class IncomingKV:
    """What of its KV comes from elsewhere, owned by the worker's connector and its leases."""

    prefilled_here: bool  # else a prefill worker computes the prompt and hands its KV over
    drawn_at: float | None = None  # when a prefill worker drew its first token, on the engine's clock
    arrival: ArrivingKV | None = None  # until all of it has come, or no more will
    fetched: int = 0  # tokens that have come from the KV pool
    lossy: bool = False  # some has come with fewer bits than it is kept in: it is not stored for others


@dataclass(slots=True)
class PrefillState:
    """Owned by the prefill scheduler and worker. Seconds on the engine's clock."""

    waiting_since: float
    scheduled_at: float | None = None
    left_out: bool = False  # so that others are in time, in the order of the last plan (prefill.ordering)
    handoff: LayerSink | None = None


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """See the module's legend. `stays` says whether decoding goes on in this worker after prefill.

    `blocks`, `reserved` and `offload` belong to the KV manager, `penalties`, `grammar` and `pooled` to the model
    runner, `proposed` to what drafts for it; parts of other owners are objects of their own.
    """

    order: LeaseOrder
    _: KW_ONLY
    root: InitVar[bytes]
    stays: bool
    long_rope: bool = False
    now: InitVar[float] = 0.0
    kv_dtype: str = AUTO  # what its blocks hold; `root` is of the same
    batched_with: str = field(init=False)  # sequences of which it is the same are computed together
    request: Request = field(init=False)
    tokens: list[int] = field(init=False)
    start: int = field(init=False)
    told: int = field(init=False)
    most: int = field(init=False)
    computed: int = 0
    cached: int = 0  # tokens whose KV was found, not computed
    in_flight: int = 0  # steps begun and not accounted for that it is part of: its blocks must outlive them
    ended: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    reserved: int = 0  # blocks that it is sure to get once it is computed, beside `blocks`
    waits_kept: bool = False  # it has not begun: `blocks` are what is cached of it, and may be let go of for others
    offload: OffloadState | None = None  # KV in host memory: `blocks` begin after it
    penalties: PenaltyState | None = None  # can be rebuilt from the tokens at any time, as `grammar`
    grammar: GrammarState | None = None
    proposed: ProposerState | None = None  # where a model drafts
    pooled: PooledState | None = None  # of the tokens computed so far, where an embedding is wanted
    prefix: PrefixKeys = field(init=False)
    incoming: IncomingKV = field(init=False)
    prefill: PrefillState = field(init=False)
    objectives: Objectives = field(init=False)

    def __post_init__(self, root: bytes, now: float) -> None:
        self.request = self.order.request
        self.batched_with = self.kv_dtype if self.request.pooling is None else f"{self.kv_dtype} embeddings"
        self.tokens = [*self.request.prompt, *self.order.generated]
        self.start = len(self.tokens)
        self.told = self.start + 1
        self.most = len(self.request.prompt) + self.request.sampling.max_tokens
        self.prefix = PrefixKeys(root)
        self.incoming = IncomingKV(prefilled_here=not self.stays)
        self.prefill = PrefillState(now)
        self.objectives = Objectives.of(self.order, now)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output(self) -> Sequence[int]:
        """The output tokens, as a view that costs nothing to make."""
        return OutputView(self.tokens, self.prompt_len)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def may_draw(self) -> bool:
        """False while its grammar is being compiled: a step that drew for it would wait, and all others with it."""
        return self.grammar is None or self.grammar.ready

    @property
    def opened(self) -> bool:
        """True once it has its blocks, or some are reserved for it."""
        return (bool(self.blocks) and not self.waits_kept) or self.reserved > 0

    @property
    def held_blocks(self) -> int:
        """Blocks' worth of tokens it has room for, wherever they lie."""
        return len(self.blocks) + (self.offload.blocks if self.offload is not None else 0)

    def block(self, index: int) -> int:
        """The block that its tokens of this block number lie in; of one that has gone to the host, a block there."""
        return self.blocks[index] if self.offload is None else self.offload.block(index)

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be computed; decoding, always one."""
        return len(self.tokens) - self.computed

    def finish_for(self, token: int, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Why the sequence ends with `token`, already appended, or None if it goes on."""
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP  # the sampler keeps these out until min_tokens is reached
        length = len(self.tokens)  # full_with, spelt out: this is done for every token
        return FinishReason.LENGTH if length >= self.most or length >= max_model_len else None

    def full_with(self, more: int, max_model_len: int) -> bool:
        """True if so many more tokens are the last it may have, whatever they are."""
        return self.output_len + more >= self.request.sampling.max_tokens or len(self.tokens) + more >= max_model_len

    def untold(self, *, but: int = 0, finish: FinishReason | None = None) -> Delta | None:
        """The message for all tokens that nobody has been told of, `but` the last so many; None where there are none.

        Each came with a step of its own.
        """
        first, self.told = self.told, max(self.told, len(self.tokens) - but)
        tokens, prompt_len = tuple(self.tokens[first : self.told]), len(self.request.prompt)
        if not tokens:
            return None
        cached = min(self.cached, prompt_len)
        return JoinedDelta(
            index=first - prompt_len, tokens=tokens, finish=finish, cached_tokens=cached, steps=len(tokens)
        )

    def delta(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], finish: FinishReason | None) -> Delta:
        """The message for tokens that were just appended."""
        self.told = len(self.tokens)
        prompt_len = len(self.request.prompt)
        first = len(self.tokens) - prompt_len - len(tokens)
        return Delta(
            index=first,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            cached_tokens=self.cached if self.cached < prompt_len else prompt_len,
            prompt_logprobs=tuple(self.prompt_logprobs) if first == 0 else (),
        )


@dataclass(slots=True)  # not frozen: one for every token, and frozen ones take three times as long to make
class SequenceOutput:
    """What a step brings out for one sequence: either new tokens or the error that ended it.

    `prefilled` marks the token that a prefill drew.
    """

    seq: SequenceState
    delta: Delta | None = None
    error: MillraceError | None = None
    prefilled: bool = False


def of_crash(error: MillraceError, seq: SequenceState, computing: Collection[SequenceState] | None) -> MillraceError:
    """How an engine's death ends a sequence: as one of its last step, or beside it. None: any may have been part."""
    in_step = computing is None or seq in computing
    return type(error)(error.message, code=IN_STEP if in_step else BESIDE_STEP)
