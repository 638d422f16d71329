"""What a worker's own HTTP door answers: before there is a worker, that it lives and what it waits for; then its state.

It may not know how a model is loaded or how a worker is built: it is shown the worker once that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.worker.worker import Worker
from serving.certificate_metrics import with_certificates
from serving.fleet_metrics import worker_metrics
from serving.grpc_tls import GrpcTls
from serving.trace_metrics import with_spans
from serving.tracing_config import TRACE_COUNTS

if TYPE_CHECKING:
    from fastapi import FastAPI

STALLED_SECONDS = 120.0  # a step this old means the engine is stuck


class WorkerDoor:
    """/live, /health, /metrics, /version and /audit. `waits_for` is what /health tells until `show` is called."""

    def __init__(self, served_names: Sequence[str], metrics_prefix: str, tls: GrpcTls | None = None):
        self.served_names = tuple(served_names)
        self.metrics_prefix = metrics_prefix
        self.tls = tls
        self.waits_for = "the model to load"
        self._worker: Worker | None = None
        self._metrics: Callable[[], bytes] = bytes  # of a worker that is not there yet: none

    def show(self, worker: Worker | None) -> None:
        """From now on the door speaks of this worker; None: there is none just now, and the last one is let go."""
        self._worker, self._metrics = worker, bytes
        if worker is None:
            return
        name, *_ = (*self.served_names, worker.identity.model)
        self._metrics = worker_metrics(name, worker.status, self.metrics_prefix)

    def app(self) -> FastAPI:
        from serving.api.status import status_app

        page = with_certificates(lambda: self._metrics(), self.tls, self.metrics_prefix)
        metrics_text = with_spans(page, TRACE_COUNTS, self.metrics_prefix)
        return status_app(health=self.health, metrics_text=metrics_text, audit=self._audit)

    def health(self) -> tuple[bool, str]:
        """True if the worker can take work, and the reason if it cannot."""
        return (False, f"waiting for {self.waits_for}") if self._worker is None else health_of(self._worker)

    def _audit(self) -> Mapping[str, int]:
        return {} if self._worker is None else self._worker.audit_now().counts


def health_of(worker: Worker) -> tuple[bool, str]:
    """True if the worker can take work, and the reason if it cannot."""
    if worker.loop.crashed:
        return False, "the engine died"
    if worker.draining:
        return False, "draining"
    if worker.engine.stalled_seconds > STALLED_SECONDS:
        return False, f"a step has been running for {worker.engine.stalled_seconds:.0f} s"
    return True, "ok"
