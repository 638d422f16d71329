"""What the engine asks of a model that drafts: tokens to try in a step, made once the step is planned.

A scheduler reserves places for them, which hold PROMISED until the proposer has filled them in, on the engine's thread
and without its lock. Whatever it fills in changes no token of a text, only when steps are over. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving.engine.plan import Work
from serving.engine.proposed import Proposing
from serving.engine.sequence import SequenceState


class Proposer(Protocol):
    """Drafts with a model. Called on the engine's thread, but for `behind` and `room`, which are asked while planning.

    `method` is its name in configuration and metrics.
    """

    method: str

    def behind(self, seq: SequenceState) -> int:
        """Tokens of the sequence to compute before its next one can be drafted."""
        ...

    def room(self, seq: SequenceState) -> int:
        """The most tokens that can be drafted now; 0 where it cannot draft for this sequence."""
        ...

    def propose(self, work: Sequence[Work]) -> Proposing:
        """Fill in what was promised: as many tokens, fewer, or none."""
        ...
