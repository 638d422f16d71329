"""Which role nobody would serve without a worker. Pure: it knows candidates, and nothing of how workers come and go."""

from __future__ import annotations

from collections.abc import Container, Iterable

from router.candidate import Candidate
from serving.messages import Role


def lacking_without(candidates: Iterable[Candidate], going: Container[str], generation: str) -> Role | None:
    """The role that workers of the generation would not serve without those of `going`, by name; None: they would."""
    staying = [each for each in candidates if not each.status.draining and each.status.name not in going]
    able = [each for each in staying if each.generation == generation]
    if not any(each.prefills for each in able):
        return Role.PREFILL
    return None if any(each.decodes for each in able) else Role.DECODE
