"""Whose prompts are computed first where not all can be in time: those of tenants that have been served less.

Pure: no torch, no clock, no I/O. Of one tenant's prompts the order stays what it was.

A prompt ends, in tokens, when its tenant has been served what it was before, what goes before the prompt among its
tenant's own, and the prompt itself: self-clocked fair queueing (Golestani, INFOCOM 1994) by the counters of Sheng et
al., "Fairness in Serving Large Language Models" (OSDI 2024). Prompts that end within EQUAL tokens of each other are as
good as each other, so that objectives decide among these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serving.engine.sequence import SequenceState
from serving.fair_shares import FairShares, tenant_of

EQUAL = 512  # tokens


class FairPrompts:
    """The tokens of prompts that tenants were computed by one worker.

    While two tenants have prompts of one level in the queue, and their order is by `turns`, neither is computed more
    tokens than the other by more than one of the other's prompts and EQUAL: who goes before a prompt ends less than
    EQUAL tokens after it, in each step by itself, whatever order a tenant's own prompts had in those before. A tenant
    that runs out of prompts is owed nothing when it comes back.
    """

    def __init__(self) -> None:
        self.shares = FairShares()

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        """The prompt comes into the queue, which does not hold it yet."""
        self.shares.arrived(tenant_of(seq.request), {tenant_of(other.request) for other in queue})

    def computing(self, seq: SequenceState, tokens: int) -> None:
        """A step computes so many tokens of the prompt."""
        self.shares.charge(tenant_of(seq.request), tokens)

    def turns(self, queue: Sequence[SequenceState], levels: Mapping[SequenceState, float]) -> dict[SequenceState, int]:
        """For each prompt of a queue that is in order but for fairness, how late it ends: 0 for the first of its level.

        Prompts of one tenant never change places by it.
        """
        ends: dict[str, float] = {}
        found: dict[SequenceState, float] = {}
        first: dict[float, float] = {}
        for seq in queue:
            tenant, level = tenant_of(seq.request), levels[seq]
            before = ends[tenant] if tenant in ends else self.shares.served(tenant)
            ends[tenant] = found[seq] = end = before + seq.uncomputed
            first[level] = min(end, first.get(level, end))
        return {seq: int((end - first[levels[seq]]) // EQUAL) for seq, end in found.items()}


def of_several(queue: Sequence[SequenceState]) -> bool:
    """True if not all prompts are one tenant's."""
    whose = tenant_of(queue[0].request)
    return any(tenant_of(seq.request) != whose for seq in queue)
