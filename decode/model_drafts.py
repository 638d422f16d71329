"""Drafts that a model makes, as the scheduler sees them: what they cost, and places promised to them in a step.

Pure: no torch, no clock. The model itself is a Proposer (serving.engine.proposer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from statistics import median
from typing import Protocol

from serving.engine.proposed import PROMISED, Proposing
from serving.engine.proposer import Proposer
from serving.engine.sequence import SequenceState

DECAY = 0.9  # of the memory of accepted drafts, a draft
COSTS = 9  # steps whose drafts' cost is remembered
FEWEST_COSTS = 3  # of them, to tell a cost
BELIEVED = 24 * FEWEST_COSTS  # times what it took to catch up: to look again costs one step in 24


class Drafts(Protocol):
    """The drafts of one sequence, from wherever they come."""

    rest: int  # tokens to go before the next trial, while drafting does not pay

    @property
    def accepted(self) -> float:
        """The chance of a drafted token if those before it were accepted, recent drafts counting more."""

    @property
    def behind(self) -> int:
        """Tokens to compute before a draft can be made."""

    @property
    def left(self) -> int:
        """The most tokens that the sequence may still get. Asked only of one that is behind."""

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens to try after `tokens`; PROMISED where they are not known yet."""

    def verified(self, drafted: int, accepted: int) -> None:
        """So many of the drafted tokens were accepted."""


@dataclass(slots=True)
class AcceptedShare:
    """The chance of a drafted token if those before it were accepted, fading by `fade` a draft.

    `prior` counts as much as two tokens. So a few right ones tell, as a trial of one token now and then is all there is
    where a model's drafts did not pay before.
    """

    fade: float
    prior: float = 0.5
    drafted: float = 0.0
    accepted: float = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Of a draft the first `accepted` tokens were right; of those after the first wrong one nothing is known."""
        self.drafted = self.fade * self.drafted + min(drafted, accepted + 1)
        self.accepted = self.fade * self.accepted + accepted

    @property
    def value(self) -> float:
        return (self.accepted + 2.0 * self.prior) / (self.drafted + 2.0)


@dataclass(slots=True)
class ModelDrafts:
    """Promises of what `proposer` will draft for a sequence; `prior` is the share expected to be accepted."""

    seq: SequenceState
    proposer: Proposer
    prior: InitVar[float]
    rest: int = 0
    seen: AcceptedShare = field(init=False)

    def __post_init__(self, prior: float) -> None:
        self.seen = AcceptedShare(DECAY, prior)

    @property
    def accepted(self) -> float:
        return self.seen.value

    @property
    def behind(self) -> int:
        return self.proposer.behind(self.seq)

    @property
    def left(self) -> int:
        return self.seq.request.sampling.max_tokens - self.seq.output_len

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        return [PROMISED] * min(count, self.proposer.room(self.seq))

    def verified(self, drafted: int, accepted: int) -> None:
        self.seen.observe(drafted, accepted)


@dataclass(slots=True)
class MiddleCost:
    """Seconds a token, the median of the last steps that told: 0 while too few have for one slow step not to count.

    Where drafts do not pay nothing is measured any more, so a step that the machine held up must not decide that.
    """

    last: deque[float] = field(default_factory=lambda: deque(maxlen=COSTS))

    def observe(self, seconds: float) -> None:
        self.last.append(seconds)

    @property
    def value(self) -> float:
        return median(self.last) if len(self.last) >= FEWEST_COSTS else 0.0


@dataclass(slots=True)
class ProposingCost:
    """What a model takes: 0 while unknown, and where no model drafts.

    Where it is too dear to catch up, nothing would tell that it is so no more: after a while its cost is unknown again.
    """

    drafting: MiddleCost = field(default_factory=MiddleCost)
    catching_up: MiddleCost = field(default_factory=MiddleCost)
    believed: float = 0.0  # seconds of steps until then

    @property
    def draft(self) -> float:
        """Seconds of a drafted token."""
        return self.drafting.value

    @property
    def backlog(self) -> float:
        """Seconds of a token that the model has to catch up on."""
        return self.catching_up.value

    def observe(self, took: Proposing, step_seconds: float = 0.0) -> None:
        """A step of so many seconds has been made, and the model took this."""
        if took.drafted:
            self.drafting.observe(took.drafting_seconds / took.drafted)
        if took.caught_up:
            self.catching_up.observe(took.catching_up_seconds / took.caught_up)
            self.believed = BELIEVED * took.catching_up_seconds
            return
        self.believed -= step_seconds
        if self.believed <= 0.0:
            self.catching_up.last.clear()
