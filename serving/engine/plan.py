"""What one engine step will do: which sequences advance and by how many tokens, within the step's budgets.

Schedulers fill a plan in the order the worker's role lists them. Pure; no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from serving.engine.gate import Gate
from serving.engine.record import StepRecord
from serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of `seq`, from position `seq.computed`; `by` hears of it when the step is done.

    The last of them may be guesses: `draft`, tokens the sequence does not have yet, to be compared with those drawn.
    Where the KV before them is still arriving, the step waits for it at `gate`, and may leave it with nothing done.
    """

    seq: Sequence
    count: int
    by: Scheduler
    draft: tuple[int, ...] = ()
    gate: Gate | None = None

    @property
    def left(self) -> bool:
        """Whether the step left the gate: nothing was computed."""
        return self.gate is not None and self.gate.left

    @property
    def tokens(self) -> list[int]:
        """The tokens the step computes."""
        start = self.seq.computed
        return [*self.seq.tokens[start : start + self.count - len(self.draft)], *self.draft]

    @property
    def plain(self) -> bool:
        """Whether a sequence that lives on this worker decodes one token, with all its KV on the device."""
        seq = self.seq
        return (
            self.count == 1
            and not self.draft
            and self.gate is None
            and seq.stays
            and seq.spill is None
            and seq.handoff is None
            and seq.uncomputed == 1
            and len(seq.tokens) > seq.start
        )

    @property
    def completes(self) -> bool:
        """Whether the step computes the sequence's last token, so that a new one is drawn after it and each guess."""
        return self.seq.computed + self.count == len(self.seq.tokens) + len(self.draft)


@dataclass(slots=True)
class Plan:
    """A step being planned: `tokens` and `seqs` are what is left of its budgets.

    `ahead`: it begins before the step that runs now has told its tokens, and its sequences may be part of both.
    `leads`: the next may begin so before this one has, if this is plain work alone.
    """

    tokens: int
    seqs: int
    ahead: bool = False
    leads: bool = False
    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks; their owners must be told

    @property
    def gate(self) -> Gate | None:
        return self.work[0].gate if self.work else None

    def add(
        self, seq: Sequence, count: int, by: Scheduler, draft: tuple[int, ...] = (), gate: Gate | None = None
    ) -> None:
        assert len(draft) < count <= self.tokens and self.seqs > 0 and (self.ahead or not seq.in_flight)
        assert self.gate is None and (gate is None or not self.work), "who waits at a gate must not keep others waiting"
        self.work.append(Work(seq, count, by, draft, gate))
        self.tokens -= count
        self.seqs -= 1


class Scheduler(Protocol):
    """Chooses which of its sequences advance in a step."""

    def fill(self, plan: Plan, now: float) -> None:
        """Add work until a budget is used up or nothing is left to do."""

    def fill_ahead(self, plan: Plan, now: float) -> bool:
        """Add decode work to a step that begins before the running one's tokens are known; False: it has to wait.

        A sequence in flight counts as one token longer, and must have room for that one's KV. Nobody is preempted.
        """
        ...

    def stepped(self, seq: Sequence) -> None:
        """A sequence it scheduled has advanced and goes on."""

    def judged(self, seq: Sequence, guessed: int, right: int) -> None:
        """Of the tokens it had guessed for a sequence so many were right."""

    def measured(self, record: StepRecord) -> None:
        """What a step took."""

    def remove(self, seq: Sequence) -> None:
        """Forget the sequence, if it is here."""

    def sequences(self) -> list[Sequence]:
        """Every sequence it holds."""
        ...


class KV(Protocol):
    """What the engine and its schedulers ask of the KV cache (kvcache.manager.KVManager)."""

    @property
    def block_size(self) -> int: ...
    def least_blocks(self, seq: Sequence) -> int: ...
    def open(self, seq: Sequence, *, headroom: int = 0) -> None: ...
    def rematch(self, seq: Sequence) -> None: ...
    def grow(self, seq: Sequence) -> None: ...
    def make_room(self, seq: Sequence, count: int) -> int: ...
    def publish(self, seq: Sequence) -> None: ...
    def release(self, seq: Sequence) -> None: ...
