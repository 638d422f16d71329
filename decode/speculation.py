"""Speculative decoding: drafts are what followed the same run earlier in the text, or what a model makes of it.

A draft changes no output. The token at a position is a function of (logits, parameters, seed, position), so each
drafted token is compared with the one that is sampled, and the first that differs replaces the rest. Only time is at
stake, and this file decides when drafting pays. Pure: no torch, no clock.

Prompt lookup is due to Saxena, "Prompt Lookup Decoding" (2023); exact verification by fixed noise is our own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from decode.model_drafts import AcceptedShare, Drafts, ModelDrafts, ProposingCost
from serving.engine.plan import StepRecord
from serving.engine.proposed import CLOSE
from serving.engine.proposer import Proposer
from serving.engine.sequence import SequenceState
from serving.fading_line import FadingLine

SIZES = (4, 3, 2)  # tokens that must match, longest first
RARE = 24  # tokens between drafts for a sequence whose drafts have been failing
FADE = 0.99  # of the memory of steps, a step
DECAY = 0.9  # of the memory of accepted drafts, a draft


@dataclass(slots=True)
class PromptLookup:
    """Where each run of tokens of a sequence last occurred before its end: a function of its tokens, kept up."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)  # run of tokens → position after it
    seen: int = 0  # tokens taken in
    accepted: float = 0.5  # share of drafted tokens that were accepted, recent ones counting more
    rest: int = 0  # tokens to go before the next trial, while drafting does not pay

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

    def verified(self, drafted: int, accepted: int) -> None:
        """So many of the drafted tokens were accepted."""
        self.accepted = DECAY * self.accepted + (1 - DECAY) * accepted / drafted


class DraftCost(FadingLine):
    """Seconds of a step as a + b · tokens, fitted to the steps so far, old ones fading (weighted least squares)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(FADE)

    def token_share(self, tokens: int) -> float:
        """The share of the time of a step of so many tokens that grows with their number: 0 to 1; 1 while unknown."""
        if self.weight < 3 or self.spread <= 1e-9 * self.xx * self.weight:
            return 1.0
        slope = self.slope
        base = max(0.0, (self.y - slope * self.x) / self.weight)
        whole = base + slope * tokens
        return slope * tokens / whole if whole > 0 else 1.0

    def seconds(self, tokens: int) -> float | None:
        """A step of so many tokens; None while unknown."""
        if self.weight < 3 or self.spread <= 1e-9 * self.xx * self.weight:
            return None
        return max(0.0, (self.y - self.slope * self.x) / self.weight) + self.slope * tokens

    def tokens_within(self, seconds: float, most: int) -> int:
        """The most tokens that a step of so many seconds can compute. Ask only where `seconds` are known."""
        left = seconds - (self.seconds(0) or 0.0)
        return max(0, int(min(most, left / self.slope))) if self.slope > 0.0 else most if left >= 0.0 else 0


@dataclass(slots=True)
class DraftTurns:
    """Who drafts in a step in which some sequences lag behind their TPOT objectives: those, and no others.

    A draft makes the step longer for everyone. To the sequence itself it is worth that long before it is to all of
    them: then it may have `spare` tokens, so many as let those that are in time stay so.
    """

    lagging: set[SequenceState]
    spare: int

    @staticmethod
    def of(running: Collection[SequenceState], cost: DraftCost, limit: int, now: float) -> DraftTurns | None:
        """None where nobody lags, or what a step takes is not known. `limit` tokens are drafted at most.

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
        if not lagging:
            return None
        return DraftTurns(lagging, cost.tokens_within(least, len(lagging) * limit + batch) - batch)


class Speculation:
    """Drafts for the sequences of one worker, `limit` tokens at most each, where they pay.

    k more tokens in a step of T tokens, of which a share p is accepted, cost k·b seconds and save k·p tokens' worth of
    steps, (a + b·T)/T seconds each. So drafting pays when p > b·T / (a + b·T): when most of a step's cost is fixed.
    Where a `proposer` makes the drafts, each takes it d seconds more: p > (b + d)·T / (a + b·T).
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

    def begin(self, seq: SequenceState, batch: int) -> Drafts:
        """The drafts of a sequence that has none yet. A model's are expected to be as good as its others were."""
        if self.proposer is None:
            return PromptLookup()
        drafts = ModelDrafts(seq, self.proposer, self.seen.value)
        if drafts.accepted <= self.needed(batch):
            drafts.rest = self.trial_steps(drafts, batch)
        return drafts

    def needed(self, batch: int) -> float:
        """The share of drafted tokens that has to be accepted for drafts to pay, in a step of about `batch` tokens."""
        share, step = self.cost.token_share(batch), self.cost.seconds(batch)
        return share if not step else share + self.proposing.draft * batch / step

    def draft(
        self, drafts: Drafts, tokens: Sequence[int], room: int, batch: int, turns: DraftTurns | None = None
    ) -> list[int]:
        """Tokens to try after `tokens`, at most `room`, in a step of about `batch` tokens.

        `turns` of a sequence that lags. For it alone k tokens pay when p > b / (a + b·T): the others lend the rest.
        """
        count = min(self.limit, room)
        if count < 1:
            return []
        needed = self.needed(batch)
        if drafts.accepted <= needed:
            lent = turns is not None and turns.spare > 0 and drafts.behind <= CLOSE
            if turns is not None and lent and drafts.accepted > needed / batch:
                draft = drafts.draft(tokens, min(count, turns.spare))
                turns.spare -= len(draft)
                return draft
            drafts.rest -= 1
            if drafts.rest > 0:
                return []
            drafts.rest = self.trial_steps(drafts, batch)  # does not pay now; look again from time to time
            count = 1
        elif not self.repays(drafts, batch):
            return []
        return drafts.draft(tokens, count)

    def trial_steps(self, drafts: Drafts, batch: int) -> int:
        """Steps between trials, so many that these take no more than one step in RARE would."""
        step = self.cost.seconds(batch)
        trial = self.proposing.backlog * drafts.behind + self.proposing.draft
        return RARE if not step else max(RARE, int(RARE * trial / step))

    def repays(self, drafts: Drafts, batch: int) -> bool:
        """False where a model would have to catch up on more than its drafts could save until the sequence's end.

        A drafted token saves (p - needed share) · (a + b·T)/T seconds; of those left a step brings 1 + k·p.
        """
        step = self.cost.seconds(batch)
        if drafts.behind <= CLOSE or step is None:
            return True
        saved = (drafts.accepted - self.needed(batch)) * step / batch
        drafted = drafts.left * self.limit / (1.0 + self.limit * drafts.accepted)
        return saved * drafted > self.proposing.backlog * drafts.behind

    def verified(self, drafts: Drafts, drafted: int, accepted: int) -> None:
        drafts.verified(drafted, accepted)
        self.seen.observe(drafted, accepted)
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_at[position] += 1

    def measured(self, record: StepRecord) -> None:
        self.cost.observe(record.new_tokens, record.verifying_seconds)
        self.proposing.observe(record.proposing, record.verifying_seconds)
