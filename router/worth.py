"""What a class of requests makes of the best placement there is: take it, wait for a better one, or give up.

Pure but for the request that goes on without its objectives. It knows neither workers nor queues.
"""

from __future__ import annotations

from router.policy import Decision, Demand
from router.refusals import check_hope, hopeless
from router.request_state import RequestState
from serving.service_class import ServiceClass


def judged(known: ServiceClass, state: RequestState) -> bool:
    """True if the best placement may end its wait, though no worker has room: its class refuses or degrades it."""
    return not state.generated and (known.shed or (known.degrade and not state.degraded))


def sheddable(known: ServiceClass, state: RequestState, decision: Decision) -> bool:
    """True if a worker is to end it once it is late and rests: what then comes of it is decided here again.

    A policy that predicts nothing would send it to the next queue; and choices that the client sees already would end
    with one that is refused.
    """
    if state.handed_back or decision.predicted is None:
        return False
    return state.request.alone and judged(known, state)


def welcome(known: ServiceClass, state: RequestState, demand: Demand, decision: Decision) -> bool:
    """False if the placement is late, or behind more than its class waits for: other workers may do better."""
    if decision.predicted is None or state.generated:
        return True
    late = hopeless(decision.predicted, demand.first_token_in, _objective(demand))
    return not late and (known.backlog is None or decision.predicted.queue <= known.backlog)


def worth(known: ServiceClass, state: RequestState, demand: Demand, decision: Decision) -> bool:
    """False if a request of this class waits here rather than in that worker's queue, or has to queue up again.

    If it is late at the best placement, elsewhere too or because others would lose more there, it is refused with
    Overloaded or goes on without its objectives, by its class. A text that has begun goes on in any case.
    """
    predicted = decision.predicted
    if predicted is None or state.generated:
        return True
    if judged(known, state) and hopeless(predicted, demand.first_token_in, _objective(demand)):
        if known.shed:
            check_hope(predicted, demand.first_token_in, state)
        state.degrade()
        return False
    return known.backlog is None or predicted.queue <= known.backlog


def _objective(demand: Demand) -> float | None:
    """Seconds to the first token."""
    return None if demand.slo.ttft_ms is None else demand.slo.ttft_ms / 1e3
