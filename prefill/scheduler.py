"""Which prompts are computed in a step, and how much of each: in the order they are due, in chunks that decodes allow.

Pure: no torch, no clock, no I/O. What the order and the chunks are is left to prefill.ordering and prefill.chunking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from prefill.chunking import Chunking, FixedChunks
from prefill.ordering import FirstComeFirstServed, PromptOrder
from serving.engine.plan import KVBlocks, StepPlan, StepRecord
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom


class PrefillScheduler:
    """The queue of prompts. `then` takes sequences that go on decoding in this worker (a mixed worker's batch).

    Without `order` and `chunks` it is first come, first served within the step's budget. A prompt that holds blocks
    keeps them, whoever passes it; a step goes on past one that has no tokens in it if `chunks` say so.
    """

    def __init__(
        self,
        kv: KVBlocks,
        then: Callable[[SequenceState], None] | None = None,
        measured: Callable[[StepRecord], None] | None = None,
        *,
        order: PromptOrder | None = None,
        chunks: Chunking | None = None,
    ):
        self.kv = kv
        self.order = order or FirstComeFirstServed()
        self.chunks = chunks or FixedChunks()
        self.then = then
        self.on_measured = measured
        self.queue: list[SequenceState] = []
        self._due: dict[SequenceState, None] = {}  # those of the queue that have a TTFT objective

    def add(self, seq: SequenceState) -> None:
        """Queue it. What is cached of a prompt for a decode elsewhere is kept for it; a lease keeps its own.

        On a worker that decodes nothing is: there, room is for leases.
        """
        if self.then is None and not seq.opened:
            self.kv.keep_cached(seq)
        self.order.arrived(seq, self.queue)
        self.queue.append(seq)
        if seq.objectives.due < inf:
            self._due[seq] = None

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return sum(seq.uncomputed for seq in self.queue)

    def pressing(self) -> Iterator[SequenceState]:
        """Prompts with a TTFT objective that a step can compute, whoever else waits: they have their blocks."""
        return (seq for seq in self._due if seq.opened and seq.may_draw and seq.incoming.arrival is None)

    def wanted_blocks(self) -> int:
        """Blocks for the first prompt that holds none yet: those which come free next are for it."""
        for seq in self.queue:
            if not seq.opened:
                return self.kv.least_blocks(seq)
        return 0

    def fill(self, plan: StepPlan, now: float) -> None:
        if not self.queue or plan.tokens < 1 or plan.seqs < 1:
            return
        full = False
        self.chunks.begin(plan, now)
        self.order.sort(self.queue, self.chunks.usual(plan), plan.work, now)
        for seq in self.queue:
            if plan.tokens < 1 or plan.seqs < 1:
                return
            if seq.incoming.arrival is not None or (full and not seq.opened):
                continue  # the first prompt that waits for blocks gets the next ones freed
            if self.chunks.most(seq, plan) < 1:
                if self.chunks.passed(seq):
                    continue
                return
            if _waits(seq, self.chunks.most(seq, plan)):
                continue
            if self._start(seq, now):
                most = max(1, self.chunks.most(seq, plan))  # there may be less of it to compute now
                if _waits(seq, most):
                    continue
                count = self.kv.make_room(seq, min(seq.uncomputed, most))
                self.chunks.took(seq, count)
                self.order.computing(seq, count)
                plan.add(seq, count, self)
            else:
                full = True  # but prompts that hold their blocks go on: theirs are the ones that will come free
        if not plan.work and not plan.paused:
            self._fill_arriving(plan, now)

    def fill_ahead(self, plan: StepPlan, now: float) -> bool:
        """Prompts are begun by ordinary steps alone: True while there is none, no room for one, or no turn."""
        full = False
        self.order.sort(self.queue, plan.tokens, plan.work, now)
        for seq in self.queue if plan.tokens and plan.seqs else ():
            if seq.incoming.arrival is not None or (full and not seq.opened) or _waits(seq, plan.tokens):
                continue
            if self._start(seq, now):
                return False
            full = True
        return True

    def _fill_arriving(self, plan: StepPlan, now: float) -> None:
        """Nothing else is to run: begin a prompt whose prefix is still coming, alone, for the step may have to wait."""
        for seq in self.queue:
            if seq.incoming.arrival is not None and seq.may_draw:
                seq.incoming.arrival.enter()
                if seq.prefill.scheduled_at is None:
                    seq.prefill.scheduled_at = now
                count = min(seq.uncomputed, plan.tokens)  # charged to no tenant: the step may leave, and delays nobody
                plan.add(seq, count, self, barrier=seq.incoming.arrival.barrier)
                return

    def _start(self, seq: SequenceState, now: float) -> bool:
        """See that the sequence has its blocks and the freshest prefix; False while there are no blocks for it."""
        if seq.prefill.scheduled_at is None:
            if not self._begun(seq):
                return False
            seq.prefill.scheduled_at = now
        return True

    def _begun(self, seq: SequenceState) -> bool:
        """True if it has its blocks now. Others let go of what is only kept for them, the last of the queue first.

        Those before it too: it has its turn because they cannot go on.
        """
        self.kv.make_way(seq, (other for other in reversed(self.queue) if other is not seq))
        try:
            self.kv.begin(seq)
        except NoRoom:
            return False
        return True

    def stepped(self, seq: SequenceState) -> None:
        """Called with one token to go, the one just drawn, once the prompt is computed."""
        if seq.uncomputed == 1 and len(seq.tokens) > seq.start:
            self.remove(seq)
            self.kv.refresh(self.queue)
            if seq.stays:
                assert self.then is not None, "a sequence that stays needs a decode scheduler"
                self.then(seq)

    def verified(self, seq: SequenceState, drafted: int, accepted: int) -> None:
        """Prompts are not drafted."""

    def measured(self, record: StepRecord) -> None:
        """Fetches of prefixes are weighed against it; the order and the chunks go by the worker's model instead."""
        if self.on_measured is not None:
            self.on_measured(record)

    def remove(self, seq: SequenceState) -> None:
        if seq in self.queue:
            self.queue.remove(seq)
            self._due.pop(seq, None)

    def sequences(self) -> list[SequenceState]:
        return list(self.queue)


def _waits(seq: SequenceState, most: int) -> bool:
    """True if computing so many of its tokens at most would draw one, and its grammar is not compiled yet."""
    return not seq.may_draw and seq.uncomputed <= most
