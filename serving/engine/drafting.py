"""Has a proposer fill in what a step's plan promises, before the step runs.

A draft is never worth a text: one that the proposer makes a mistake over is left out, and so are later ones of its
sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from serving.engine.plan import Work
from serving.engine.proposed import NO_DRAFTS, ProposerState, Proposing
from serving.engine.proposer import Proposer
from serving.errors import MISTAKES

Computed = Callable[[Sequence[Work], Sequence[int]], None]
"""Told of what the model has just computed: work, and the position of each one's first token."""

log = logging.getLogger(__name__)


def fill_in_drafts(proposer: Proposer | None, work: Sequence[Work]) -> Proposing:
    """Fill in the drafts that are promised, cut to what their sequences' grammars allow; what that took."""
    promised = [item for item in work if item.draft and item.promised]
    if not promised:
        return NO_DRAFTS
    assert proposer is not None, "only a proposer's drafts are promised"
    try:
        took = proposer.propose(promised)
    except MISTAKES:
        log.exception("%s cannot draft for %d sequences, which go on without", proposer.method, len(promised))
        for item in promised:
            item.fill_in(())
            item.seq.proposed = ProposerState(failed=True)
        return NO_DRAFTS
    for item in promised:
        assert not item.promised, "every promise is kept or taken back"
        grammar = item.seq.grammar
        if grammar is not None and item.draft:
            possible = grammar.possible(item.seq.output, item.draft)
            item.cut = len(item.draft) - possible
            item.fill_in(item.draft[:possible])
    return took


def surely(computed: Computed) -> Computed:
    """The same, but that a mistake there is not one of the step's: the sequences have no more drafts."""

    def tell(work: Sequence[Work], starts: Sequence[int]) -> None:
        try:
            computed(work, starts)
        except MISTAKES:
            log.exception("%d sequences go on without drafts", len(work))
            for item in work:
                item.seq.proposed = ProposerState(failed=True)

    return tell
