"""Speculative decoding: drafts are what followed the same run earlier in the text, or what a model makes of it.

A draft changes no output. The token at a position is a function of (logits, parameters, seed, position), so each
drafted token is compared with the one that is sampled, and the first that differs replaces the rest. Only time is at
stake, and this file decides when drafting pays. Pure: no torch, no clock.

Prompt lookup is due to Saxena, "Prompt Lookup Decoding" (2023); exact verification by fixed noise is our own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field
from math import inf

from decode.model_drafts import AcceptedShare, Drafts, ModelDrafts, ProposingCost
from serving.engine.plan import StepRecord
from serving.engine.proposed import CLOSE
from serving.engine.proposer import Proposer
from serving.engine.sequence import SequenceState
from serving.fading_line import FadingLine

SIZES = (4, 3, 2)  # tokens that must match, longest first
RARE = 24  # steps between trials of a model's drafts that do not pay, and between guesses that are far from paying
FADE = 0.99  # of the memory of steps, a step
DECAY = 0.9  # of the memory of accepted drafts, a draft
TRIED = 0.01  # of the time of steps, spent on drafts that may pay, to learn what they cost


@dataclass(slots=True)
class PromptLookup:
    """Where each run of tokens of a sequence last occurred before its end: a function of its tokens, kept up.

    What its drafts are worth it learns without a step too: it compares what it would have drafted with what came.
    """

    prior: InitVar[float] = 0.5
    last: dict[tuple[int, ...], int] = field(default_factory=dict)  # run of tokens → position after it
    seen: int = 0  # tokens taken in
    share: AcceptedShare = field(init=False)
    rest: int = 0  # steps to go before it looks at its guess again, or makes one
    guess: list[int] = field(default_factory=list)  # what it would have drafted
    guessed_at: int = 0  # after so many tokens
    owed: float = 0.0  # seconds that its present draft, a trial, is thought to cost

    def __post_init__(self, prior: float) -> None:
        self.share = AcceptedShare(DECAY, prior)

    @property
    def accepted(self) -> float:
        return self.share.value

    @property
    def behind(self) -> int:
        """It drafts from tokens, which it need not compute."""
        return 0

    @property
    def left(self) -> int:
        return 0

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier place where the sequence ended like now."""
        self._take_in(tokens)
        for size in SIZES:
            at = self.last.get(tuple(tokens[-size:]))
            if at is not None:
                return list(tokens[at : at + count])
        return []

    def _take_in(self, tokens: Sequence[int]) -> None:
        """Remember every run that something follows: all but the one at the very end."""
        for end in range(max(self.seen, 1), len(tokens)):
            for size in SIZES:
                if end >= size:
                    self.last[tuple(tokens[end - size : end])] = end
        self.seen = len(tokens)

    def look(self, tokens: Sequence[int], count: int, pause: int) -> tuple[int, int]:
        """Judge the guess where its tokens have come, and rest for `pause` steps; else guess up to `count` tokens.

        How many tokens were guessed and how many came so; (0, 0) while that is not known.
        """
        judged = self.judge(tokens)
        if judged[0] and pause:
            self.rest = pause
            return judged
        if not self.guess:
            self.guess, self.guessed_at = self.draft(tokens, count), len(tokens)
        self.rest = max(1, self.guessed_at + len(self.guess) - len(tokens)) if self.guess else max(1, min(count, pause))
        return judged

    def judge(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many tokens it had guessed and how many came so; (0, 0) while that is not known."""
        guess = self.guess
        if not guess:
            return 0, 0
        came = tokens[self.guessed_at : self.guessed_at + len(guess)]
        right = agreeing(guess, came)
        if right == len(came) < len(guess):
            return 0, 0  # so far it is right
        self.guess = []
        self.share.observe(len(guess), right)
        return len(guess), right

    def verified(self, drafted: int, accepted: int) -> None:
        """So many of the drafted tokens were accepted. What it had guessed for the same place counts no more."""
        self.share.observe(drafted, accepted)
        self.guess, self.owed = [], 0.0


def agreeing(guess: Sequence[int], came: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for place, (guessed, real) in enumerate(zip(guess, came, strict=False)):
        if guessed != real:
            return place
    return min(len(guess), len(came))


class DraftCost(FadingLine):
    """Seconds of a step as a + b · tokens, fitted to the steps so far, old ones fading (weighted least squares)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(FADE)

    @property
    def known(self) -> bool:
        """False until steps of different sizes have told what a token adds."""
        return self.weight >= 3 and self.spread > 1e-9 * self.xx * self.weight

    def seconds(self, tokens: int) -> float | None:
        """A step of so many tokens; None while unknown."""
        if not self.known:
            return None
        slope = self.slope
        return max(0.0, (self.y - slope * self.x) / self.weight) + slope * tokens

    def tokens_within(self, seconds: float, most: int) -> int:
        """The most tokens that a step of so many seconds can compute. Ask only where `seconds` are known."""
        left = seconds - (self.seconds(0) or 0.0)
        return max(0, int(min(most, left / self.slope))) if self.slope > 0.0 else most if left >= 0.0 else 0


@dataclass(slots=True)
class DraftTurns:
    """Who drafts in a step of sequences that have TPOT objectives: where some lag behind theirs those, and no others.

    A draft makes the step longer for everyone: `spare` tokens let those that are in time stay so. To a sequence that
    lags a draft is worth that long before it is to all of them.
    """

    lagging: set[SequenceState]
    spare: int

    @staticmethod
    def of(running: Collection[SequenceState], cost: DraftCost, limit: int, now: float) -> DraftTurns | None:
        """None where nobody is to be in time, or what a step takes is not known. `limit` tokens are drafted at most.

        A sequence lags if the next step would end after its next token is due, unless it had to be given up: with every
        draft accepted its last token would still come too late.
        """
        batch = len(running)
        step = cost.seconds(batch)
        if step is None:
            return None
        lagging: set[SequenceState] = set()
        least = inf  # slack of those in time
        for seq in running:
            goals, tokens = seq.objectives, len(seq.tokens)
            if goals.origin == inf:
                continue
            slack = goals.slack(tokens, now)
            left = seq.request.sampling.max_tokens - seq.output_len
            if slack >= step:
                least = min(least, slack)
            elif slack - step + (left - 1) * (goals.tpot - step / (1 + limit)) >= 0.0:
                lagging.add(seq)
        if not lagging and least == inf:
            return None
        drafting = len(lagging) or batch
        return DraftTurns(lagging, cost.tokens_within(least, drafting * limit + batch) - batch)

    def has(self, seq: SequenceState) -> bool:
        """True if this sequence may draft."""
        return not self.lagging or seq in self.lagging


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What drafts cost in a step of so many sequences, as of some `total` of measured seconds."""

    batch: int
    total: float
    step: float | None  # seconds without drafts; None while it is not known what a token adds
    each: float  # seconds that a drafted token adds
    needed: float  # the chance of the first drafted token from which on it pays

    def depth(self, chance: float, most: int) -> int:
        """How many drafted tokens pay, each accepted with this chance if those before it were."""
        step, each = self.step, self.each
        if step is None:
            return 0
        count, reached, expected = 0, chance, 0.0
        while count < most and reached * (step + count * each) > each * (self.batch + expected):
            count += 1
            expected += reached
            reached *= chance
        return count


class Speculation:
    """Drafts for the sequences of one worker, `limit` tokens at most each, where they pay.

    A step of T tokens takes S = a + b·T seconds and each drafted token u = b + d more, d where a model makes it. With k
    of them, of which e are accepted in the mean, a step brings T + e tokens in S + k·u seconds: another one that is
    accepted with the chance q pays when q·(S + k·u) > u·(T + e). So the first pays when q > u·T / S, when most of a
    step's cost is fixed, and a sequence drafts the deeper, the better its drafts are.

    Where they do not pay, prompt lookup learns of its drafts by guesses that no step computes; what drafts cost is
    learned from steps that draft nevertheless, where they come near to paying, in the share TRIED of time.
    """

    def __init__(self, limit: int, proposer: Proposer | None = None):
        self.limit = limit
        self.proposer = proposer
        self.method = "ngram" if proposer is None else proposer.method
        self.cost = DraftCost()
        self.proposing = ProposingCost()
        self.seen = AcceptedShare(FADE)  # of all sequences
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
        self.accepted_at = [0] * limit  # of the drafts so many had their first token accepted, their second, …
        self.allowance = 0.0  # seconds that trials may take, below 0 after one
        self._seconds = 0.0  # of the last step
        self._price: StepPrice | None = None  # the last one asked for

    def begin(self, seq: SequenceState, batch: int) -> Drafts:
        """The drafts of a sequence that has none yet. They are expected to be as good as others were."""
        if self.proposer is None:
            return PromptLookup(self.seen.value)
        drafts = ModelDrafts(seq, self.proposer, self.seen.value)
        if drafts.accepted <= self.needed(batch):
            drafts.rest = self.trial_steps(drafts, batch)
        return drafts

    def needed(self, batch: int) -> float:
        """The chance of the first drafted token from which on it pays, in a step of about `batch` tokens."""
        return self.price(batch).needed

    def price(self, batch: int) -> StepPrice:
        """The same for all sequences of a step."""
        cost, found = self.cost, self._price
        if found is None or found.batch != batch or found.total != cost.y or self.proposer is not None:
            step, each = cost.seconds(batch), self.proposing.draft
            if step is not None:
                each += cost.slope
            found = self._price = StepPrice(batch, cost.y, step, each, each * batch / step if step else 1.0)
        return found

    def depth(self, chance: float, batch: int, most: int) -> int:
        """How many drafted tokens pay, each accepted with this chance if those before it were."""
        return self.price(batch).depth(chance, most)

    def draft(
        self, drafts: Drafts, tokens: Sequence[int], room: int, batch: int, turns: DraftTurns | None = None
    ) -> list[int]:
        """Tokens to try after `tokens`, at most `room`, in a step of about `batch` tokens.

        `turns` of a sequence that lags. For it alone a draft pays when its chance > u / S: the others lend the rest.
        """
        most = min(self.limit, room)
        if most < 1:
            return []
        price, chance = self.price(batch), drafts.accepted
        count = price.depth(chance, most) if chance > price.needed else 0
        if count > 0:
            return drafts.draft(tokens, count) if self.repays(drafts, batch) else []
        lent = turns is not None and turns.lagging and turns.spare > 0 and drafts.behind <= CLOSE
        if turns is not None and lent and chance > price.needed / batch:
            draft = drafts.draft(tokens, min(most, turns.spare))
            turns.spare -= len(draft)
            return draft
        if self.rests(drafts, tokens, batch):
            return []
        if isinstance(drafts, PromptLookup):
            draft = drafts.draft(tokens, most)
            if draft:
                drafts.owed = len(draft) * price.each if price.step is not None else self._seconds / 2
                self.allowance -= drafts.owed  # before others of the step ask
            return draft
        drafts.rest -= 1
        if drafts.rest > 0:
            return []
        drafts.rest = self.trial_steps(drafts, batch)  # does not pay now; look again from time to time
        return drafts.draft(tokens, 1)

    def rests(self, drafts: Drafts, tokens: Sequence[int], batch: int) -> bool:
        """True if prompt lookup drafts nothing now: that does not pay, and trials have no time left, or no hope.

        Its guesses are compared instead. Ask once a step.
        """
        if not isinstance(drafts, PromptLookup):
            return False
        price, chance = self.price(batch), drafts.accepted
        near = price.step is None or chance > price.needed / 2
        if chance > price.needed or (near and self.allowance > 0.0):
            return False
        drafts.rest -= 1
        if drafts.rest <= 0:
            guessed, right = drafts.look(tokens, self.limit, 0 if near else RARE)
            if guessed:
                self.seen.observe(guessed, right)
        return True

    def trial_steps(self, drafts: Drafts, batch: int) -> int:
        """Steps between trials, so many that these take no more than one step in RARE would."""
        step = self.cost.seconds(batch)
        trial = self.proposing.backlog * drafts.behind + self.proposing.draft
        return RARE if not step else max(RARE, int(RARE * trial / step))

    def repays(self, drafts: Drafts, batch: int) -> bool:
        """False where a model would have to catch up on more than its drafts could save until the sequence's end.

        A draft of k tokens, e of them accepted in the mean, saves e·S/T - k·u seconds, and a step brings 1 + e of those
        left.
        """
        if drafts.behind <= CLOSE:
            return True
        step = self.cost.seconds(batch)
        if step is None:
            return True
        count = self.depth(drafts.accepted, batch, self.limit)
        expected = sum(drafts.accepted**place for place in range(1, count + 1))
        saved = expected * step / batch - count * (self.cost.slope + self.proposing.draft)
        return saved * drafts.left / (1.0 + expected) > self.proposing.backlog * drafts.behind

    def refused(self, drafts: Drafts, drafted: int) -> None:
        """A grammar leaves nothing of the draft: no step computes it, and it was wrong."""
        if isinstance(drafts, PromptLookup):
            self.allowance += drafts.owed
        drafts.verified(drafted, 0)
        self.seen.observe(drafted, 0)

    def verified(self, drafts: Drafts, drafted: int, accepted: int) -> None:
        """Of the tokens drafted for a sequence so many were accepted. What was right in a trial has cost nothing."""
        price = self._price
        if isinstance(drafts, PromptLookup) and price is not None and price.step is not None:
            self.allowance += min(drafts.owed, accepted * price.step / price.batch)
        drafts.verified(drafted, accepted)
        self.seen.observe(drafted, accepted)
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_at[position] += 1

    def measured(self, record: StepRecord) -> None:
        seconds = self._seconds = record.verifying_seconds
        self.allowance = min(self.allowance, 0.0) + TRIED * seconds
        if not record.prompt_tokens:  # those cost less each: many rows are computed at once
            self.cost.observe(record.new_tokens, seconds)
        self.proposing.observe(record.proposing, seconds)
