"""Drafts of a modelled model: each token is right with a chance of its text's own, so that texts differ as they do.

It fills in what schedulers have planned. Whether to draft, and how much, is decided by the classes that serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from statistics import NormalDist

from deploy.simulator.texts import VOCABULARY, ScriptedTexts
from serving.engine.plan import Work
from serving.engine.proposed import NO_DRAFTS, Proposing
from serving.engine.sequence import SequenceState

MOST = 64  # tokens at a time
_MASK = (1 << 64) - 1
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModel:
    """`right` is the share of drafted tokens that a text in the middle takes over.

    `spread` is the standard deviation of ln(share / (1 - share)) among texts. With four tokens at a time, 0.5 and 0.5
    give 1.9 tokens a step and 0.24 of its logarithm from text to text, as measured (docs/log.md).
    """

    right: float = 0.5
    spread: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.right < 1.0 or not 0.0 <= self.spread <= 4.0:
            raise ValueError(f"--drafts {self.right:g}: give a share above 0 and below 1")

    def share(self, seed: int) -> float:
        """The share of the text of a request with this seed."""
        odds = log(self.right / (1.0 - self.right)) + self.spread * _NORMAL.inv_cdf(uniform(seed, 0))
        return 1.0 / (1.0 + exp(-odds))


class ModelledProposer:
    """Drafts that come without a model of their own, as those of prompt lookup do: they take no time.

    A request's drafts follow from its seed and the position, whoever computes them.
    """

    method = "modelled"

    def __init__(self, drafts: DraftModel, texts: ScriptedTexts):
        self.texts = texts
        self._share = lru_cache(maxsize=1024)(drafts.share)  # by seed: the same at every step of a text

    def behind(self, seq: SequenceState) -> int:
        return 0

    def room(self, seq: SequenceState) -> int:
        return MOST

    def propose(self, work: Sequence[Work]) -> Proposing:
        for item in work:
            item.fill_in(self._drafted(item.seq, len(item.draft)))
        return NO_DRAFTS

    def _drafted(self, seq: SequenceState, count: int) -> list[int]:
        request, known = seq.request, list(seq.tokens)
        share = self._share(request.sampling.seed)
        for _ in range(count):
            token = self.texts.next(request, known)
            if uniform(request.sampling.seed, len(known)) >= share:
                token = 1 + token % (VOCABULARY - 1)  # any other
            known.append(token)
        return known[-count:]


def uniform(seed: int, position: int) -> float:
    """Above 0 and below 1, and another for each of both."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ (mixed >> 31)) % (1 << 52) + 0.5) / (1 << 52)
