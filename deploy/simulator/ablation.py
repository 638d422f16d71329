"""What of the way requests are placed and batched can be switched off in a simulated cluster, one thing at a time.

Pure: a plan in, a plan out. It only sets what is configurable, so that what remains is what serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.simulator.cluster import ClusterPlan

NO_INDEX = 1  # bytes: no room for a single block, so no worker is known to hold any


def _score(plan: ClusterPlan) -> ClusterPlan:
    """Placed by least load instead."""
    return replace(plan, router=replace(plan.router, policy="least_loaded"))


def _affinity(plan: ClusterPlan) -> ClusterPlan:
    """The router knows of no cached prefix; workers go on reusing those they have."""
    return replace(plan, router=replace(plan.router, prefix_index_bytes=NO_INDEX))


def _order(plan: ClusterPlan) -> ClusterPlan:
    """Prompts are computed first come, first served."""
    return replace(plan, engine=replace(plan.engine, prefill_order="fcfs"))


def _chunk(plan: ClusterPlan) -> ClusterPlan:
    """Steps compute what their budget of tokens leaves to prompts."""
    return replace(plan, engine=replace(plan.engine, chunking="fixed"))


def _bound(plan: ClusterPlan) -> ClusterPlan:
    """No lease is refused because of the TPOT of others."""
    return replace(plan, engine=replace(plan.engine, tpot_admission=False))


def _shedding(plan: ClusterPlan) -> ClusterPlan:
    """Nobody is refused or held back because of how long it would take."""
    classes = {name: replace(known, shed=False, backlog=None) for name, known in plan.router.classes.items()}
    return replace(plan, router=replace(plan.router, classes=classes))


def _drafts(plan: ClusterPlan) -> ClusterPlan:
    """No token is drafted."""
    if plan.drafts is None:
        raise ValueError("--without drafts: nothing is drafted without --drafts")
    return replace(plan, drafts=None, engine=replace(plan.engine, num_speculative_tokens=0))


ABLATIONS: dict[str, Callable[[ClusterPlan], ClusterPlan]] = {
    "score": _score,
    "affinity": _affinity,
    "order": _order,
    "chunk": _chunk,
    "drafts": _drafts,
    "bound": _bound,
    "shedding": _shedding,
}


def without(plan: ClusterPlan, name: str) -> ClusterPlan:
    """The plan with one thing switched off. Raises ValueError for a name that is not in ABLATIONS, or is off."""
    if name not in ABLATIONS:
        raise ValueError(f"--without {name}: there are {', '.join(ABLATIONS)}")
    return ABLATIONS[name](plan)
