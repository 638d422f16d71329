"""Which role nobody would serve without a worker. Pure: it knows candidates, and nothing of how workers come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from router.candidate import Candidate
from serving.messages import Role


def lacking_without(candidates: Iterable[Candidate], own: Candidate, going: Collection[str] = ()) -> Role | None:
    """The role of a worker, `own`, that no other one of its generation would serve; None: others do.

    Those that drain or are `going`, by name, serve no more. A role that it has not, nobody loses by it: it may be about
    to take one that is not served at all.
    """
    gone = {own.status.name, *going}
    others = [each for each in candidates if not each.status.draining and each.status.name not in gone]
    able = [each for each in others if each.generation == own.generation]
    if own.prefills and not any(each.prefills for each in able):
        return Role.PREFILL
    return Role.DECODE if own.decodes and not any(each.decodes for each in able) else None
