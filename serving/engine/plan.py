"""What one engine step will do: which sequences advance and by how many tokens, within the step's budgets.

Schedulers fill a plan in the order the worker's role lists them. Pure; no torch, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.batch.layer_barrier import LayerBarrier
from serving.engine.proposed import NO_DRAFTS, PROMISED, Proposing
from serving.engine.sequence import SequenceState
from serving.messages import STEP_TOKEN_BINS
from serving.step_cost import StepLoad, pairs


@dataclass(slots=True)  # not frozen: one for every token, and frozen ones take three times as long to make
class Work:
    """`count` tokens of `seq`, from position `seq.computed`; `by` is told when the step is done.

    The last of them may be a `draft`, tokens the sequence does not have yet, to be compared with those drawn. A model
    may have promised them: then they are filled in before the step runs.
    Where the KV before them is still arriving, the step waits for it at `barrier`, and may leave it with nothing done.
    """

    seq: SequenceState
    count: int
    by: Scheduler
    draft: tuple[int, ...] = ()
    barrier: LayerBarrier | None = None
    cut: int = 0  # tokens that a model drafted and the sequence's grammar refuses

    @property
    def left(self) -> bool:
        """True if the step left the barrier: nothing was computed."""
        return self.barrier is not None and self.barrier.left

    @property
    def promised(self) -> bool:
        """True while the drafted tokens are not known."""
        return bool(self.draft) and self.draft[0] == PROMISED

    def fill_in(self, draft: Sequence[int]) -> None:
        """What was promised, or less."""
        assert len(draft) <= len(self.draft)
        self.count += len(draft) - len(self.draft)
        self.draft = tuple(draft)

    @property
    def tokens(self) -> list[int]:
        """The tokens the step computes."""
        start = self.seq.computed
        return [*self.seq.tokens[start : start + self.count - len(self.draft)], *self.draft]

    @property
    def decodes_one(self) -> bool:
        """True if a sequence that stays on this worker decodes one token, with all its KV on the device."""
        seq = self.seq
        return (
            self.count == 1
            and not self.draft
            and self.barrier is None
            and seq.stays
            and seq.offload is None
            and seq.prefill.handoff is None
            and seq.uncomputed == 1
            and len(seq.tokens) > seq.start
        )

    @property
    def of_prompt(self) -> bool:
        """True if it computes tokens the sequence was opened with; else those are computed, and it decodes."""
        return len(self.seq.tokens) == self.seq.start

    @property
    def completes(self) -> bool:
        """True if the step computes the sequence's last token: a new one is drawn after it and each drafted one."""
        return self.seq.computed + self.count == len(self.seq.tokens) + len(self.draft)


@dataclass(slots=True)  # not frozen: one for every step, and frozen ones take three times as long to make
class PlannedLoad:
    """A step's load, and how many of its new tokens are of prompts."""

    step: StepLoad
    prompt_tokens: int


@dataclass(slots=True)
class StepPlan:
    """A step being planned: `tokens` and `seqs` are what is left of its budgets.

    `ahead`: it begins before the step that runs now has told its tokens, and its sequences may be part of both.
    `can_overlap`: the next may begin so before this one has, if each sequence decodes one token.
    """

    tokens: int
    seqs: int
    ahead: bool = False
    can_overlap: bool = False
    work: list[Work] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)  # lost their blocks; their owners are told
    may_pause: bool = True  # decodes, for prompts
    paused: int = 0  # sequences that do

    @property
    def barrier(self) -> LayerBarrier | None:
        return self.work[0].barrier if self.work else None

    def load(self) -> PlannedLoad:
        """What the step computes, once it has begun: a sequence of the step before counts as one token longer."""
        new = prompt = context = single = 0
        seen = 0.0
        for work in self.work:
            seq, count = work.seq, work.count
            if len(seq.tokens) == seq.start:  # Work.of_prompt, spelt out: this is done for every row
                prompt += count
            if count == 1:
                single += seq.computed + seq.in_flight
                new += 1
                continue
            start = seq.computed + seq.in_flight - 1
            new += count
            context += start + count
            seen += pairs(start, count)
        return PlannedLoad(StepLoad(new, seen + single, len(self.work), context + single), prompt)

    def add(
        self,
        seq: SequenceState,
        count: int,
        by: Scheduler,
        draft: tuple[int, ...] = (),
        barrier: LayerBarrier | None = None,
    ) -> None:
        work = self.work
        assert len(draft) < count <= self.tokens and self.seqs > 0 and (self.ahead or not seq.in_flight)
        assert not work or (barrier is None and work[0].barrier is None), (
            "a sequence that waits at a barrier is alone in its step"
        )
        work.append(Work(seq, count, by, draft, barrier))
        self.tokens -= count
        self.seqs -= 1

    def add_tokens(self, work: Sequence[Work]) -> None:
        """`add` work of a token each, which nobody changes: the same for every step of a sequence."""
        assert len(work) <= self.tokens and len(work) <= self.seqs and self.barrier is None
        assert self.ahead or not sum([each.seq.in_flight for each in work])
        self.work += work
        self.tokens -= len(work)
        self.seqs -= len(work)

    def drop(self, seq: SequenceState) -> None:
        """The sequence is no part of the step after all, if it was."""
        for i, work in enumerate(self.work):
            if work.seq is seq:
                del self.work[i]
                self.tokens += work.count
                self.seqs += 1
                return


class Scheduler(Protocol):
    """Chooses which of its sequences advance in a step."""

    def fill(self, plan: StepPlan, now: float) -> None:
        """Add work until a budget is used up or nothing is left to do."""

    def fill_ahead(self, plan: StepPlan, now: float) -> bool:
        """Add decode work to a step that begins before the running one's tokens are known; False: it has to wait.

        A sequence in flight counts as one token longer, and must have room for that one's KV. None is preempted.
        """
        ...

    def stepped(self, seq: SequenceState) -> None:
        """A sequence it scheduled has advanced and goes on."""

    def verified(self, seq: SequenceState, drafted: int, accepted: int) -> None:
        """Of the tokens it had drafted for a sequence so many were accepted."""

    def measured(self, record: StepRecord) -> None:
        """What a step took."""

    def remove(self, seq: SequenceState) -> None:
        """Forget the sequence, if it is here."""

    def sequences(self) -> list[SequenceState]:
        """Every sequence it holds."""
        ...


class KVBlocks(Protocol):
    """What the engine and its schedulers ask of the KV cache (kvcache.blocks.manager.KVCacheManager)."""

    @property
    def block_size(self) -> int: ...
    def least_blocks(self, seq: SequenceState) -> int: ...
    def open(self, seq: SequenceState, *, headroom: int = 0, waits: bool = False) -> None: ...
    def begin(self, seq: SequenceState) -> None: ...
    def keep_cached(self, seq: SequenceState) -> None: ...
    def make_way(self, seq: SequenceState, waiting: Iterable[SequenceState]) -> None: ...
    def refresh(self, waiting: Iterable[SequenceState]) -> None: ...
    def grow(self, seq: SequenceState) -> None: ...
    def make_room(self, seq: SequenceState, count: int) -> int: ...
    def publish(self, seq: SequenceState) -> None: ...
    def release(self, seq: SequenceState) -> None: ...


@dataclass(kw_only=True, slots=True)  # not frozen: one for every step, and frozen ones take three times as long to make
class StepRecord:
    """Counts, and seconds on the engine's clock. What is neither forward, sample nor proposing is Python.

    `cadence_seconds` are what the step adds to a busy engine's time: from the end of the step before, where the engine
    has not slept since, to its own end, without what it waited for KV.
    """

    began: float
    load: StepLoad  # nothing where the step left the barrier
    prompt_tokens: int = 0  # of the new tokens
    schedule_seconds: float
    batch_seconds: float  # building the ragged batch
    forward_seconds: float  # in the model
    sample_seconds: float
    step_seconds: float
    waited_seconds: float = 0.0  # of those in the model, for KV on its way from elsewhere
    hidden_seconds: float = 0.0  # Python for this step while another computed: no part of the others
    cadence_seconds: float = 0.0
    proposing: Proposing = NO_DRAFTS  # drafts that a model made, before the batch was built

    @property
    def new_tokens(self) -> int:
        return self.load.new_tokens

    @property
    def busy_seconds(self) -> float:
        return self.step_seconds - self.waited_seconds

    @property
    def python_seconds(self) -> float:
        return self.step_seconds - self.forward_seconds - self.sample_seconds - self.proposing.seconds

    @property
    def verifying_seconds(self) -> float:
        """The busy seconds without those in which a model drafted."""
        return self.busy_seconds - self.proposing.seconds


@dataclass(slots=True)
class StepTotals:
    """Running sums over all steps of a worker's life. `sizes` counts steps by their tokens, in the bins of
    STEP_TOKEN_BINS.
    """

    sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BINS) + 1))
    steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    python_seconds: float = 0.0
    waited_seconds: float = 0.0
    proposing_seconds: float = 0.0
    paused: int = 0  # times that a sequence was left out of a step for a prompt

    def add(self, record: StepRecord) -> None:
        self.sizes[bisect_left(STEP_TOKEN_BINS, record.new_tokens)] += 1
        self.steps += 1
        self.tokens += record.new_tokens
        self.step_seconds += record.step_seconds
        self.forward_seconds += record.forward_seconds
        self.sample_seconds += record.sample_seconds
        self.python_seconds += record.python_seconds
        self.waited_seconds += record.waited_seconds
        self.proposing_seconds += record.proposing.seconds
