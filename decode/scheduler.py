"""Which sequences decode in a step: all of them, oldest first, one token each; the youngest give way without blocks.

Pure: no torch, no clock, no I/O.
"""

from __future__ import annotations

from serving.engine.plan import KV, Plan
from serving.engine.sequence import Sequence
from serving.errors import NoRoom


class DecodeScheduler:
    """The running batch, in order of arrival."""

    def __init__(self, kv: KV):
        self.kv = kv
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
                plan.add(seq, 1, self)

    def _make_room(self, seq: Sequence, plan: Plan) -> bool:
        """Grow `seq` by a block if it needs one, preempting from the youngest on; False if it had to go itself."""
        while True:
            try:
                self.kv.grow(seq)
                return True
            except NoRoom:
                youngest = self.running[-1]
                self._preempt(youngest, plan)
                if youngest is seq:
                    return False

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        self.preemptions += 1
        plan.preempted.append(seq)

    def stepped(self, seq: Sequence) -> None:
        """Nothing to do: a decoding sequence stays in the batch."""

    def remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)

    def sequences(self) -> list[Sequence]:
        return list(self.running)
