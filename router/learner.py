"""What came of placements, told to those who predict: policy, links' costs, output lengths, arrivals. No torch."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from router.arrivals import Arrivals
from router.fleet import Fleet
from router.output_lengths import OutputLengths
from router.policy import Decision, Policy
from router.request_state import RequestState
from serving.service_class import ServiceClass


class Learner:
    """Compares what attempts bring with what was predicted of them."""

    def __init__(
        self,
        fleet: Fleet,
        outputs: OutputLengths,
        service_class: Callable[[RequestState], ServiceClass],
    ):
        self.fleet = fleet
        self.outputs = outputs
        self.service_class = service_class

    def learn(self, state: RequestState, policy: Policy) -> None:
        """Tokens have come: compare what the present attempt has brought with what was predicted of it."""
        if not state.attempts:
            return
        attempt, ended = state.attempts[-1], state.finished
        decision, prefill, decode = attempt.decision, attempt.decision.prefill, attempt.decision.decode
        if attempt.first_at == attempt.last_at:
            policy.observed(decision, ttft=attempt.first_at - attempt.began_at)
            if prefill is not None and state.in_time:
                self._was_in_time(state, decision, prefill.status.instance, attempt.last_at)
        elif attempt.second_at == attempt.last_at and prefill is not decode and prefill is not None is not decode:
            waited = attempt.second_at - (attempt.first_at or 0.0)
            step = decision.predicted.step if decision.predicted is not None else 0.0
            costs = self.fleet.link_costs
            costs.observed(prefill.status.instance, decode.status.instance, state.tokens, waited - step)
        if ended:
            policy.observed(decision, tpot=attempt.tpot, step_tokens=attempt.step_tokens)
            if state.request.pooling is None:
                self.outputs.ended(state.request.service_class, len(state.generated))

    def _was_in_time(self, state: RequestState, decision: Decision, prefill: str, now: float) -> None:
        limit, predicted = state.request.slo.ttft_ms, decision.predicted
        if limit is not None and predicted is not None and predicted.due_in < inf:
            weight = self.service_class(state).weight
            prompt = Arrivals(state.request.priority, limit / 1e3, predicted.prefill, weight)
            self.fleet.registry.in_time(prefill, prompt, now)
