"""Which sequences decode in a step: all of them, one token each; and which give way where blocks run out.

Pure: no torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from decode.model_drafts import Drafts
from decode.speculation import DraftTurns, Speculation
from serving.engine.plan import KVBlocks, StepPlan, StepRecord, Work
from serving.engine.proposed import PROMISED
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom

TRIAL_STEPS = 16  # steps that draft, to measure what that brings
AHEAD_STEPS = 512  # overlapped steps between trials
DECAY = 0.9  # of the memory of steps, a step


@dataclass(slots=True)
class DraftOrOverlap:
    """Decides if steps draft tokens or overlap, where the engine can overlap: an overlapped step cannot draft.

    Drafting brings `gain` more tokens for each that is sampled, less what it takes to make them; overlapping hides the
    share `saved` of a step. The better of the two is done; drafting is tried again from time to time.
    """

    gain: float = 0.0
    saved: float = 1.0  # until it is measured
    trial: int = TRIAL_STEPS  # steps of a trial to go
    overlapped: int = 0  # steps since the last trial
    drawing: int = 0  # sequences in the drafting step that runs
    accepted: int = 0  # drafted tokens in it that were accepted
    held_back: bool = False  # the last step did not draft, and none has overlapped since
    pause: int = 1  # steps to draft before holding back again, if that was in vain

    @property
    def drafting(self) -> bool:
        return self.trial > 0 or self.gain > self.saved

    def begin(self) -> bool:
        """True if a step drafts that begins when all tokens are known.

        Where no step could overlap after one was held back, that is done ever more seldom.
        """
        if self.held_back:
            self.trial, self.pause = self.pause, min(2 * self.pause, TRIAL_STEPS)
        self.held_back = not self.drafting
        return self.drafting

    def begin_ahead(self) -> bool:
        """True if a step that can overlap the one before it does."""
        self.held_back, self.pause = False, 1
        return not self.drafting

    def began(self, sequences: int) -> None:
        """A step of so many sequences has begun that may draft."""
        self.drawing, self.accepted = sequences, 0

    def measured(self, record: StepRecord) -> None:
        if record.hidden_seconds > 0.0:
            share = record.hidden_seconds / (record.hidden_seconds + record.busy_seconds)
            self.saved = share if self.saved == 1.0 else DECAY * self.saved + (1 - DECAY) * share
            self.overlapped += 1
            if self.overlapped >= AHEAD_STEPS:
                self.overlapped, self.trial = 0, TRIAL_STEPS
        elif self.drawing:
            verifying = record.verifying_seconds
            slowed = 1.0 + record.proposing.seconds / verifying if verifying > 0.0 else 1.0
            gain = (1.0 + self.accepted / self.drawing) / slowed - 1.0
            self.gain = DECAY * self.gain + (1 - DECAY) * gain
            self.trial = max(0, self.trial - 1)
            self.drawing = 0


class Pauses(Protocol):
    """Says who is left out of a step, for prompts that are computed beside it (prefill.pauses)."""

    def beyond(self, running: Sequence[SequenceState], now: float) -> float:
        """Sequences less important than this priority pause if their tokens are due at no time; infinite: none do."""
        ...


class DecodeScheduler:
    """The running batch: by priority, then in order of arrival. With `speculation` a step may try more than one token.

    Drafts leave `for_prompts` tokens of a step to the prompts that are computed here too.
    When blocks run out the first of the batch never gives way to another, so the oldest of the most important always
    advances, but for steps that it sits out for a prompt (`pauses`).
    """

    def __init__(
        self, kv: KVBlocks, *, max_model_len: int, speculation: Speculation | None = None, for_prompts: int = 0
    ):
        self.kv = kv
        self.pauses: Pauses | None = None  # for prompts that are computed here too
        self.for_prompts = for_prompts
        self.max_model_len = max_model_len
        self.speculation = speculation
        self.choice = DraftOrOverlap() if speculation is not None else None
        self.running: list[SequenceState] = []
        self._drafts: dict[SequenceState, Drafts] = {}
        self._token: dict[SequenceState, Work] = {}  # one token of each that runs
        self._joined: list[SequenceState] = []  # since the last step was planned
        self.preemptions = 0

    def add(self, seq: SequenceState) -> None:
        """A sequence whose KV is here up to its last token joins the batch."""
        assert seq.uncomputed == 1, f"{seq.uncomputed} tokens without KV, a decode step computes one"
        priority, place = seq.objectives.priority, len(self.running)
        while place and self.running[place - 1].objectives.priority > priority:
            place -= 1
        self.running.insert(place, seq)
        self._token[seq] = Work(seq, 1, self)
        self._joined.append(seq)

    def _begin(self, now: float) -> None:
        """What has joined has had its first token, here just now: the pace of the others is counted from it."""
        for seq in self._joined:
            drawn_at = now if seq.incoming.drawn_at is None else seq.incoming.drawn_at
            seq.objectives.begin(len(seq.tokens), len(seq.order.generated), drawn_at)
        self._joined.clear()

    def fill(self, plan: StepPlan, now: float) -> None:
        self._begin(now)
        choice = self.choice  # None where nothing is drafted
        drafting = choice is not None and (not plan.can_overlap or not self.running or choice.begin())
        rows = self._unpaused(plan, now)
        ready = self._grown(rows, plan)
        if ready is None:
            self._fill_preempting(rows, plan, now)
        elif drafting and (drafts := self._draft_all(rows, ready, plan, now)):
            for seq in ready:
                draft = drafts.get(seq, ())
                plan.add(seq, 1 + len(draft), self, draft)
        else:
            token = self._token
            plan.add_tokens([token[seq] for seq in ready])
        if choice is not None and drafting:
            choice.began(len(plan.work))

    def _unpaused(self, plan: StepPlan, now: float) -> Sequence[SequenceState]:
        """Those that run, without those that pause."""
        plan.paused = 0
        if self.pauses is None or not self.running or not plan.may_pause:
            return self.running
        beyond = self.pauses.beyond(self.running, now)
        if beyond == inf:
            return self.running
        goals = [(seq, seq.objectives) for seq in self.running]
        rows = [seq for seq, each in goals if each.priority <= beyond or each.origin < inf]
        plan.paused = len(self.running) - len(rows)
        return rows

    def _grown(self, rows: Sequence[SequenceState], plan: StepPlan) -> list[SequenceState] | None:
        """Those that the step has room for, each with blocks for its token; None where one lacks a block."""
        ready = [seq for seq in rows if seq.grammar is None or seq.may_draw][: min(plan.tokens, plan.seqs)]
        size = self.kv.block_size
        lacking = [seq for seq in ready if len(seq.tokens) > len(seq.blocks) * size or seq.offload is not None]
        try:
            for seq in lacking:
                self.kv.grow(seq)
        except NoRoom:
            return None
        return ready

    def _fill_preempting(self, rows: Sequence[SequenceState], plan: StepPlan, now: float) -> None:
        """A token for each that there are blocks for, those of others if need be. Nothing is drafted."""
        preempted = plan.preempted
        for seq in list(rows):
            if plan.tokens < 1 or plan.seqs < 1:
                break
            if seq in preempted or (seq.grammar is not None and not seq.may_draw):
                continue
            if self._make_room(seq, plan, now):
                plan.add(seq, 1, self)

    def fill_ahead(self, plan: StepPlan, now: float) -> bool:
        """Add all sequences but those whose last token is being drawn, oldest first; False if one lacks blocks."""
        self._begin(now)
        if self.choice is not None and not self.choice.begin_ahead():
            return False
        for seq in self.running:
            if plan.tokens < 1 or plan.seqs < 1:
                break
            if seq.full_with(seq.in_flight, self.max_model_len) or not seq.may_draw:
                continue  # the step that runs draws its last token, or its grammar is being compiled
            if seq.offload is not None or not self._hold(seq, seq.in_flight):
                return False
            plan.add(seq, 1, self)
        return True

    def _hold(self, seq: SequenceState, unknown: int) -> bool:
        """Hold blocks for the KV of the sequence's tokens and so many unknown ones; False if there are none."""
        length = len(seq.tokens)
        seq.tokens += [0] * unknown  # a sequence is given room for the tokens it has
        try:
            self.kv.grow(seq)
        except NoRoom:
            return False
        finally:
            del seq.tokens[length:]
        return True

    def _draft_all(
        self, rows: Sequence[SequenceState], ready: Sequence[SequenceState], plan: StepPlan, now: float
    ) -> dict[SequenceState, tuple[int, ...]]:
        """Tokens to try beyond the next, by sequence, where that pays and takes no tokens or blocks from others.

        `rows` are those of the step, and `ready` the ones among them that it has room for.
        """
        speculation, batch = self.speculation, len(rows)
        if speculation is None:
            return {}
        turns = DraftTurns.of(rows, speculation.cost, speculation.limit, now)
        spare = plan.tokens - len(ready) - self.for_prompts
        if turns is not None and not turns.lagging:
            spare = min(spare, turns.spare)
        found: dict[SequenceState, tuple[int, ...]] = {}
        for seq in ready:
            if spare < 1:
                break
            if seq.request.sampling.penalised or (turns is not None and not turns.has(seq)):
                continue
            drafts = self._drafts.get(seq)
            if drafts is None:
                drafts = self._drafts[seq] = speculation.begin(seq, batch)
            if turns is None and speculation.rests(drafts, seq.tokens, batch):
                continue
            room = min(spare, self._room(seq))
            draft = speculation.draft(drafts, seq.tokens, room, batch, turns)
            if draft and seq.grammar is not None and draft[0] != PROMISED:
                possible = seq.grammar.possible(seq.output, draft)
                if not possible:
                    speculation.refused(drafts, len(draft))
                draft = draft[:possible]  # the rest would be computed in vain
            if draft:
                found[seq] = tuple(draft)
                spare -= len(draft)
        return found

    def _room(self, seq: SequenceState) -> int:
        """Tokens after the next that its text, context and blocks have room for: a draft is not worth a block."""
        length = len(seq.tokens)
        left = min(seq.request.sampling.max_tokens - seq.output_len, self.max_model_len - length) - 1
        return min(left, seq.held_blocks * self.kv.block_size - length)

    def _make_room(self, seq: SequenceState, plan: StepPlan, now: float) -> bool:
        """Grow `seq` by a block if it needs one, preempting others for it; False if it had to go itself."""
        while True:
            try:
                self.kv.grow(seq)
                return True
            except NoRoom:
                victim = self._victim(seq, now)
                self._preempt(victim, plan)
                if victim is seq:
                    return False

    def _victim(self, seq: SequenceState, now: float) -> SequenceState:
        """Who gives way to `seq`, maybe itself; where that lacks host memory, only one that holds some is of help.

        The least important; of those one whose objectives are missed or were never stated, then the one with the least
        to compute again. Without objectives it is the youngest.
        """

        def rank(place: int) -> tuple[int, bool, int, int]:
            other = self.running[place]
            goals, tokens = other.objectives, len(other.tokens)
            if not goals.stated:
                return goals.priority, True, 0, place
            return goals.priority, goals.late(tokens, now), -tokens, place

        places = range(len(self.running))
        able = [place for place in places if seq.offload is None or self.running[place].offload is not None]
        others = [place for place in able if place] or able  # all but the first
        return self.running[max(others, key=rank)]

    def _preempt(self, seq: SequenceState, plan: StepPlan) -> None:
        self.remove(seq)
        plan.drop(seq)
        self.kv.release(seq)
        self.preemptions += 1
        plan.preempted.append(seq)

    def verified(self, seq: SequenceState, drafted: int, accepted: int) -> None:
        if self.speculation is not None:
            self.speculation.verified(self._drafts[seq], drafted, accepted)
        if self.choice is not None:
            self.choice.accepted += accepted

    def measured(self, record: StepRecord) -> None:
        if self.speculation is not None:
            self.speculation.measured(record)
        if self.choice is not None:
            self.choice.measured(record)

    def stepped(self, seq: SequenceState) -> None:
        """Nothing to do: a decoding sequence stays in the batch."""

    def remove(self, seq: SequenceState) -> None:
        self._drafts.pop(seq, None)
        if self._token.pop(seq, None) is not None:
            self.running.remove(seq)

    def sequences(self) -> list[SequenceState]:
        return list(self.running)
