"""Which sequences decode in a step: all of them, oldest first, one token each; the youngest give way without blocks.

Pure: no torch, no clock, no I/O.
"""

from __future__ import annotations

from decode.speculation import Lookup, Speculation
from serving.engine.plan import KV, Plan
from serving.engine.record import StepRecord
from serving.engine.sequence import Sequence
from serving.errors import NoRoom


class DecodeScheduler:
    """The running batch, in order of arrival. With `speculation`, more than one token of a sequence may be tried."""

    def __init__(self, kv: KV, *, max_model_len: int, speculation: Speculation | None = None):
        self.kv = kv
        self.max_model_len = max_model_len
        self.speculation = speculation
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, seq: Sequence) -> None:
        """A sequence whose KV is here up to its last token joins the batch."""
        assert seq.uncomputed == 1, f"{seq.uncomputed} tokens without KV, a decode step computes one"
        self.running.append(seq)

    def fill(self, plan: Plan, now: float) -> None:
        for seq in list(self.running):
            if plan.tokens < 1 or plan.seqs < 1:
                return
            if seq in plan.preempted:
                continue
            if self._make_room(seq, plan):
                draft = self._guess(seq, plan)
                plan.add(seq, 1 + len(draft), self, draft)

    def _guess(self, seq: Sequence, plan: Plan) -> tuple[int, ...]:
        """Tokens to try beyond the next, when that pays and costs nobody else their turn or their blocks."""
        if self.speculation is None or not seq.guessable:
            return ()
        if seq.lookup is None:
            seq.lookup = Lookup()
        left = min(seq.request.sampling.max_tokens - seq.output_len - 1, self.max_model_len - len(seq.tokens) - 1)
        others = len(self.running) - len(plan.work) - 1
        held = seq.held_blocks * self.kv.block_size - len(seq.tokens)  # a guess is not worth a block
        room = min(left, held, plan.tokens - 1 - others)
        return tuple(self.speculation.guess(seq.lookup, seq.tokens, room, len(self.running)))

    def _make_room(self, seq: Sequence, plan: Plan) -> bool:
        """Grow `seq` by a block if it needs one, preempting from the youngest on; False if it had to go itself."""
        while True:
            try:
                self.kv.grow(seq)
                return True
            except NoRoom:
                youngest = self._youngest(seq)
                self._preempt(youngest, plan)
                if youngest is seq:
                    return False

    def _youngest(self, seq: Sequence) -> Sequence:
        """Who gives way to `seq`: where it lacks host memory, only one that holds some is of help."""
        return next(other for other in reversed(self.running) if seq.spill is None or other.spill is not None)

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        self.preemptions += 1
        plan.preempted.append(seq)

    def judged(self, seq: Sequence, guessed: int, right: int) -> None:
        if self.speculation is not None:
            self.speculation.judged(seq.lookup, guessed, right)

    def measured(self, record: StepRecord) -> None:
        if self.speculation is not None:
            self.speculation.measured(record)

    def stepped(self, seq: Sequence) -> None:
        """Nothing to do: a decoding sequence stays in the batch."""

    def remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)

    def sequences(self) -> list[Sequence]:
        return list(self.running)
