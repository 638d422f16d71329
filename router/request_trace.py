"""The spans of one request that the router makes: its own, and one for each wait for a place.

Workers make theirs from the context that the request carries. It decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

from router.request_state import RequestState
from serving.messages import FinishReason
from serving.timeline import Moment
from serving.tracing import NONE, ClientCall, PhaseSpan, Value, client_call, error_name, tracer

PROVIDER = "millrace"


class RequestTrace:
    """Begin it when the request has come, and end it once."""

    def __init__(self, state: RequestState):
        self.state = state
        self.call = client_call.get() or ClientCall(NONE, "embeddings" if state.request.pooling else "text_completion")
        now = tracer()
        name = f"{self.call.operation} {self.call.model}".strip()
        self.span = now.begin(name, self.call.context, now.now(), serves=True)
        if self.span is not None:
            state.request = replace(state.request, trace=self.span.context)
        self._queue = self._waiting()

    def _waiting(self) -> PhaseSpan:
        return PhaseSpan("millrace.queue", self.state.request.trace, {"millrace.attempt": len(self.state.attempts) + 1})

    def placed(self) -> None:
        """Its prefill has been sent."""
        if self.span is None:
            return
        decision = self.state.attempts[-1].decision
        self._queue.attributes["millrace.placement.reason"] = decision.reason
        self._queue.end()

    def failed(self, error: BaseException) -> None:
        """A try has failed, and another follows or the request ends."""
        if self.span is None:
            return
        self.span.event("millrace.placed_again", {"error.type": error_name(error), "millrace.tokens": self._tokens})
        self._queue.end(error_name(error))
        self._queue = self._waiting()

    @property
    def _tokens(self) -> int:
        return len(self.state.generated)

    def ended(self, failure: BaseException | None) -> None:
        if self.span is None:
            return
        state, last = self.state, self.state.last
        left = isinstance(failure, GeneratorExit)
        error = "" if failure is None or left or state.finished else error_name(failure)
        self._queue.end(error)
        finish = last.finish.value if last is not None and last.finish is not None else ""
        reason = finish or (FinishReason.STOP.value if left and self._tokens else "")
        self.span.end(self._about() | ({"gen_ai.response.finish_reasons": [reason]} if reason else {}), error)

    def _about(self) -> dict[str, Value]:
        state, sampling = self.state, self.state.request.sampling
        asked: dict[str, Value | None] = {
            "gen_ai.operation.name": self.call.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self.call.model or None,
            "gen_ai.response.model": self.call.model or None,
            "gen_ai.response.id": state.request.request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.stream": self.call.streamed,
            "gen_ai.usage.input_tokens": len(state.request.prompt),
            "gen_ai.usage.output_tokens": self._tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(attempt.cached_tokens or 0 for attempt in state.attempts[:1]),
            "gen_ai.response.time_to_first_chunk": state.timeline.between(Moment.ARRIVED, Moment.FIRST_TOKEN),
            "server.address": self.call.server[0] if self.call.server else None,
            "server.port": self.call.server[1] if self.call.server else None,
            "millrace.service_class": state.request.service_class,
            "millrace.attempts": len(state.attempts),
        }
        return {name: value for name, value in asked.items() if value is not None}
