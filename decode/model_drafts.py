"""Drafts that a model makes, as the scheduler sees them: what they cost, and places promised to them in a step.

Pure: no torch, no clock. The model itself is a Proposer (serving.engine.proposer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

from serving.engine.proposed import PROMISED, Proposing
from serving.engine.proposer import Proposer
from serving.engine.sequence import SequenceState

DECAY = 0.9  # of the memory of accepted drafts and of what they took, a draft


class Drafts(Protocol):
    """The drafts of one sequence, from wherever they come."""

    rest: int  # tokens to go before the next trial, while drafting does not pay

    @property
    def accepted(self) -> float:
        """Share of drafted tokens that were accepted, recent ones counting more."""

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
    """Share of drafted tokens that were accepted, fading by `fade` a draft; `prior` counts as much as two tokens.

    So a few right ones tell, as a trial of one token now and then is all there is where drafts did not pay before.
    """

    fade: float
    prior: float = 0.5
    drafted: float = 0.0
    accepted: float = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        self.drafted = self.fade * self.drafted + drafted
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
class ProposingCost:
    """Seconds that a model takes, recent steps counting more: 0 while unknown, and where no model drafts."""

    draft: float = 0.0  # a drafted token
    backlog: float = 0.0  # a token that it has to catch up on

    def observe(self, took: Proposing) -> None:
        if took.drafted:
            self.draft = _faded(self.draft, took.drafting_seconds / took.drafted)
        if took.caught_up:
            self.backlog = _faded(self.backlog, took.catching_up_seconds / took.caught_up)


def _faded(before: float, now: float) -> float:
    return DECAY * before + (1 - DECAY) * now if before else now
