"""What is known of drafts that a model makes: places promised to them in a plan, what they took, how far its KV goes.

Plain values; the proposer itself is serving.engine.proposer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROMISED = -1  # in place of a drafted token that is not known yet
CLOSE = 16  # tokens that a proposer computes along with its first draft; more are a backlog, computed before


@dataclass(frozen=True, slots=True)
class Proposing:
    """What the drafts of a step took, in seconds, and for how many tokens."""

    drafting_seconds: float = 0.0
    drafted: int = 0
    catching_up_seconds: float = 0.0  # on tokens of the text that the proposer had no KV of
    caught_up: int = 0

    @property
    def seconds(self) -> float:
        return self.drafting_seconds + self.catching_up_seconds


NO_DRAFTS = Proposing()


@dataclass(slots=True)
class ProposerState:
    """What a proposer knows of one sequence, hung on it: it ends with it.

    Its KV lies in the sequence's own `blocks`, in planes of the proposer's: of the tokens first..sure, first being
    where a block begins. After those may lie KV of `guessed` tokens, which counts where the text came out so.
    """

    first: int = 0
    sure: int = 0
    guessed: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # those that `sure` tokens lie in, as they were then
    named: int = 0  # leading blocks that are noted as filled (serving.proposers.known_blocks)
    failed: bool = False  # a mistake of ours, or no numbers: no more drafts for this sequence
