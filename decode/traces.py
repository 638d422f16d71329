"""Spans of the decoding of leases, from the token that another worker or a prefill drew to their last.

The decode worker tells when each begins and ends. It decides nothing.
"""

from __future__ import annotations

from serving.engine.sequence import SequenceOutput, SequenceState
from serving.tracing import PhaseSpan, error_name


class DecodeTraces:
    """Of one worker, called `worker`."""

    def __init__(self, worker: str):
        self._worker = {"millrace.worker": worker}
        self._running: dict[str, PhaseSpan] = {}  # by lease; none where the request is not traced

    def begin(self, lease: str, seq: SequenceState) -> None:
        """The lease has joined the batch."""
        if seq.request.trace is not None:
            self.end(lease, seq)
            self._running[lease] = PhaseSpan("millrace.decode", seq.request.trace, self._worker)

    def end(self, lease: str, seq: SequenceState, output: SequenceOutput | None = None) -> None:
        """`output` is the last; None where the lease was given up. Safe to repeat."""
        phase = self._running.pop(lease, None)
        if phase is None:
            return
        phase.attributes["millrace.tokens"] = len(seq.tokens) - seq.start
        failure = None if output is None else output.error
        phase.end("" if failure is None else error_name(failure))
