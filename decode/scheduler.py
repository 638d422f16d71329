"""Which sequences decode in a step: all of them, one token each; and which give way where blocks run out.

Pure: no torch, no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class DecodeScheduler:
    """The running batch: by priority, then in order of arrival. With `speculation` a step may try more than one token.

    Drafts leave `for_prompts` tokens of a step to the prompts that are computed here too.
    When blocks run out the first of the batch never gives way to another, so the oldest of the most important always
    advances.
    """

    def __init__(
        self, kv: KVBlocks, *, max_model_len: int, speculation: Speculation | None = None, for_prompts: int = 0
    ):
        self.kv = kv
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
        if not drafting and self._fill_all(plan):
            return
        turns = self._turns(now) if drafting else None
        preempted = plan.preempted
        for seq in list(self.running):
            if plan.tokens < 1 or plan.seqs < 1:
                break
            if seq in preempted or (seq.grammar is not None and not seq.may_draw):
                continue
            if self._make_room(seq, plan, now):
                draft = self._draft(seq, plan, turns) if drafting else ()
                plan.add(seq, 1 + len(draft), self, draft)
        if choice is not None and drafting:
            choice.began(len(plan.work))

    def _fill_all(self, plan: StepPlan) -> bool:
        """Plan a token for each that the step has room for; False, and nothing planned, where one lacks a block."""
        ready = [seq for seq in self.running if seq.grammar is None or seq.may_draw][: min(plan.tokens, plan.seqs)]
        size = self.kv.block_size
        lacking = [seq for seq in ready if len(seq.tokens) > len(seq.blocks) * size or seq.offload is not None]
        try:
            for seq in lacking:
                self.kv.grow(seq)
        except NoRoom:
            return False
        token = self._token
        plan.add_tokens([token[seq] for seq in ready])
        return True

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

    def _turns(self, now: float) -> DraftTurns | None:
        """Who may draft, where some lag behind; None where anyone may."""
        if self.speculation is None:
            return None
        return DraftTurns.of(self.running, self.speculation.cost, self.speculation.limit, now)

    def _draft(self, seq: SequenceState, plan: StepPlan, turns: DraftTurns | None) -> tuple[int, ...]:
        """Tokens to try beyond the next, when that pays and takes no tokens or blocks from other sequences."""
        if self.speculation is None or seq.request.sampling.penalised or (turns and seq not in turns.lagging):
            return ()
        drafts = self._drafts.get(seq)
        if drafts is None:
            drafts = self._drafts[seq] = self.speculation.begin(seq, len(self.running))
        left = min(seq.request.sampling.max_tokens - seq.output_len - 1, self.max_model_len - len(seq.tokens) - 1)
        others = len(self.running) - len(plan.work) - 1
        held = seq.held_blocks * self.kv.block_size - len(seq.tokens)  # a draft is not worth a block
        room = min(left, held, plan.tokens - 1 - others - self.for_prompts)
        draft = self.speculation.draft(drafts, seq.tokens, room, len(self.running), turns)
        if seq.grammar is not None and draft and draft[0] != PROMISED:
            draft = draft[: seq.grammar.possible(seq.output, draft)]  # the rest would be computed in vain
        return tuple(draft)

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
