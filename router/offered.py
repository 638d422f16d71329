"""What clients ask for, whether it is served or refused: the work that a fleet is sized by, and how well it was met.

Pure totals over requests as they begin and end; it knows neither workers nor who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.request_state import RequestState
from serving.step_cost import pairs
from serving.timeline import Moment


@dataclass(slots=True)
class OfferedWork:
    """Running totals of one service class since the router began. One that turns out invalid is taken out again.

    Of those that arrived: their prompts, pairs of a token and one it attends to, and objectives in seconds. Of those
    that were answered, whose length is therefore known: prompt, output, what workers held already, and the sum over
    output tokens of the context each was decoded with. Of those that were to meet an objective: how many did.
    """

    arrived: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    with_ttft: int = 0
    ttft_seconds: float = 0.0
    with_tpot: int = 0
    tpot_seconds: float = 0.0
    answered: int = 0
    answered_prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decoded_context: float = 0.0
    ttft_judged: int = 0
    ttft_met: int = 0
    tpot_judged: int = 0
    tpot_met: int = 0

    def arrives(self, state: RequestState, times: int = 1) -> None:
        """It has come; -1 times: it should not have been counted."""
        slo, tokens = state.asked.slo, len(state.request.prompt)
        self.arrived += times
        self.prompt_tokens += times * tokens
        self.prompt_pairs += times * pairs(0, tokens)
        if slo.ttft_ms is not None:
            self.with_ttft += times
            self.ttft_seconds += times * slo.ttft_ms / 1e3
        if slo.tpot_ms is not None:
            self.with_tpot += times
            self.tpot_seconds += times * slo.tpot_ms / 1e3

    def answers(self, state: RequestState) -> None:
        """It has ended as its client wanted, or its client has left with what there was."""
        prompt, output = len(state.request.prompt), len(state.generated)
        cached = state.attempts[-1].cached_tokens if state.attempts else None
        self.answered += 1
        self.answered_prompt_tokens += prompt
        self.cached_tokens += min(prompt, cached or 0)
        self.output_tokens += output
        self.decoded_context += output * (prompt + output / 2)

    def judges(self, state: RequestState, *, served: bool) -> None:
        """Refused and failed requests have missed what they were to meet; whoever has no objective meets none."""
        slo, timeline = state.asked.slo, state.timeline
        tpot = timeline.tpot
        if slo.ttft_ms is not None:
            ttft = timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN)
            self.ttft_judged += 1
            self.ttft_met += served and ttft is not None and ttft * 1e3 <= slo.ttft_ms
        if slo.tpot_ms is not None and tpot is not None:
            self.tpot_judged += 1
            self.tpot_met += served and tpot * 1e3 <= slo.tpot_ms
