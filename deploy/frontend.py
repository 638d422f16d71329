"""The front: HTTP API and router in one process, over workers in this process, below it, or anywhere.

It starts them in order, says when they are ready, and on SIGTERM lets every accepted request end before it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.embedding_form import embedding_form
from deploy.generation_config import sampling_defaults, told
from deploy.runtime.addresses import EVERYWHERE
from deploy.runtime.http_server import HttpServer
from deploy.runtime.key_file import key_file
from deploy.runtime.signals import on_signals
from router.canary import Canary
from router.candidate import Candidate
from router.generations import generations_of, ready_workers
from router.overview import RouterOverview
from router.placer import Placer
from router.policy import FleetView, split_only
from router.router import Router
from serving.api.app import create_app
from serving.api.body_work import BodyWork
from serving.api.callers import Callers
from serving.api.grammar_gate import GrammarGate
from serving.api.in_flight import InFlightRequests
from serving.api.settings import SamplingDefaults, ServedModel
from serving.background import BackgroundTasks
from serving.certificate_metrics import certificate_text
from serving.collecting import collect_seldom
from serving.config import HttpConfig, ModelConfig
from serving.errors import Unavailable
from serving.grpc_tls import Identity
from serving.http_metrics import HttpMetrics
from serving.key_metrics import KeyFigures, KeyMetrics
from serving.malloc import give_back_memory
from serving.messages import WorkerStatus
from serving.metrics import FaultFigures, RouterMetrics
from serving.model.spec import ModelSpec
from serving.reloaded import ReloadedFiles
from serving.service_config import ServiceConfig
from serving.text.tokenizer import Tokenizer
from serving.trace_metrics import trace_text
from serving.tracing_config import TRACE_COUNTS

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 2.0  # for the errors of requests that had to be ended to reach their clients
MOST_PAIRS = 1024  # where there are more, /metrics tells of the broken ones alone
SHOWN = 8  # broken pairs that /health names
TIDY_SECONDS = 5.0
CROWD = 500  # connections that have gone, between two looks or more
AUDIT_SECONDS = 2.0  # between looks for leaks, while nothing runs


class Frontend:
    """Router, API and their housekeeping over a fleet. `run()` returns once everyone accepted has been served.

    `canary_interval` in seconds, 0 for no canary. `restarts` counts background tasks that broke;
    `grpc_files` are the certificates of the gRPC between services.
    """

    def __init__(
        self,
        placer: Placer,
        http: HttpConfig,
        served: ServedModel,
        tokenizer: Tokenizer,
        listening: socket.socket,
        *,
        service: ServiceConfig | None = None,
        canary_interval: float = 0.0,
        restarts: Counter[str] | None = None,
        grpc_files: ReloadedFiles[Identity] | None = None,
    ):
        self.fleet = placer.fleet
        self.background = BackgroundTasks(restarts)
        self.canary = Canary(self.fleet, canary_interval) if canary_interval else None
        self.http = http
        self.grpc_files = grpc_files
        self.served = served
        self.metrics = RouterMetrics(
            served.names[0],
            self._statuses,
            lambda: placer.admission.waiting,
            self.fleet.pool_nodes.reports,
            self._faults,
            classes=self.fleet.config.classes,
            waiting_by_class=placer.admission.waiting_by_class,
            connections=lambda: self.server.connections(),
            prefix=http.metrics_prefix,
        )
        self.metrics.waiting_tokens = lambda: placer.admission.waiting_tokens
        self.http_metrics = HttpMetrics()
        self.keys = key_file(service or ServiceConfig(), os.environ)
        self.key_metrics = KeyMetrics(self._key_figures, http.metrics_prefix)
        self.router = Router(placer, self.metrics, self.metrics.placements)
        self.leaving = asyncio.Event()
        app = create_app(
            self.router.generate,
            tokenizer=tokenizer,
            served=served,
            config=http,
            service_config=service,
            classes=self.fleet.config.classes,
            clock=self.fleet.clock,
            placements=RouterOverview(self.router),
            health=self.health,
            audit=self.audit,
            metrics_text=self.metrics_text,
            observer=self.metrics,
            http_observer=self.http_metrics,
            keyring=self.keys.keyring if self.keys is not None else None,
        )
        self.callers: Callers = app.state.callers
        self.in_flight: InFlightRequests = app.state.in_flight
        self.bodies: BodyWork = app.state.bodies
        self.grammars: GrammarGate = app.state.grammars
        self.server = HttpServer(app, listening, http)

    def metrics_text(self) -> bytes:
        """/metrics: of the router, what it hears of workers, and this process."""
        files = {"grpc": self.grpc_files, "https": self.server.certificates}
        own = certificate_text(files, self.http.metrics_prefix)
        spans = trace_text(TRACE_COUNTS, self.http.metrics_prefix)
        return self.metrics.text() + self.http_metrics.text() + self.key_metrics.text() + own + spans

    def _statuses(self) -> list[WorkerStatus]:
        """Of the workers that can be believed: a dead one's last words are no measurement. One that has left may not be
        forgotten when the next of its name is there: metrics have one worker of a name.
        """
        return list({worker.status.name: worker.status for worker in self.fleet.registry.candidates()}.values())

    def _key_figures(self) -> KeyFigures:
        if self.keys is None:
            return KeyFigures(refused=self.callers.refused)
        file = self.keys
        return KeyFigures(
            keys=len(file.keyring), loads=file.loads, failures=file.failures, refused=self.callers.refused
        )

    def _faults(self) -> FaultFigures:
        fleet, pairs = self.fleet, self.fleet.pair_health()
        if len(pairs) > MOST_PAIRS:
            pairs = {names: well for names, well in pairs.items() if not well}
        workers = fleet.registry.workers.values()
        generations = ready_workers(fleet.candidates(), fleet.trust, fleet.clock())
        return FaultFigures(
            breakers={worker.status.name: fleet.breakers.state(worker.status.instance) for worker in workers},
            slow={worker.status.name: worker.slow for worker in workers},
            pairs=pairs,
            probes=self.canary.outcomes if self.canary is not None else {},
            restarts=self.background.restarts,
            protocols_refused=fleet.protocols_refused,
            ready={
                (name, role): count
                for name, each in generations.items()
                for role, count in (("prefill", each.prefills), ("decode", each.decodes))
            },
            shares={name: each.share for name, each in generations.items()},
        )

    def health(self) -> tuple[bool, str]:
        """True if a request sent now could be served, and "ok", or what of it is broken; the reason if not."""
        if self.in_flight.draining:
            return False, "draining"
        able = [worker for worker in self.fleet.registry.candidates() if not worker.status.draining]
        fit = [worker for worker in self.fleet.candidates() if not worker.status.draining]
        if able and not fit:
            return False, "every worker is stuck in a step"
        if not any(worker.decodes for worker in fit):
            return False, "no decode worker is ready"
        if not any(worker.prefills for worker in fit):
            return False, "no prefill worker is ready"
        if self.fleet.config.strict_disaggregation and not self._split(fit):
            return False, "--strict-disaggregation: no prefill worker has another worker to decode for it"
        generations = generations_of([w for w in fit if w.decodes], [w for w in fit if w.prefills])
        if not any(generation.complete for generation in generations.values()):
            return False, "no generation has a prefill and a decode worker: their models or versions differ"
        if self.fleet.all_well:
            return True, "ok"
        pairs = self.fleet.pair_health()
        broken = sorted(" to ".join(dict.fromkeys(names)) for names, well in pairs.items() if not well)
        if not broken:
            return True, "ok"
        if self.canary is not None and len(broken) == len(pairs):
            return False, f"no pair of workers gets a token through: {_some(broken)}"
        return True, f"broken: {_some(broken)}"

    def _split(self, fit: Sequence[Candidate]) -> bool:
        """True if some worker can prefill for another that decodes."""
        view = FleetView([w for w in fit if w.decodes], [w for w in fit if w.prefills], self.fleet.ways)
        return bool(split_only(view, self.fleet.clock()).decode)

    async def audit(self) -> Mapping[str, Any]:
        """What every service holds, for /audit; the metrics are told of what leaked."""
        audits = await self.router.audit()
        self.metrics.note_audit(audits)
        return {
            "idle": all(audit.idle for audit in audits),
            "services": [{"service": a.service, "held": a.counts, "leaked": a.leaked} for a in audits],
        }

    def leave_on_signals(self) -> None:
        """SIGTERM and Ctrl-C begin the end; a second one does not hurry it, SIGKILL does."""
        on_signals(self.leaving.set)

    async def run(self) -> None:
        """Serve until told to leave, then drain. Start the fleet first."""
        await self.bodies.start()
        collect_seldom()
        await self.server.start()
        background = self.background
        background.every(min(1.0, self.fleet.config.silence / 4), "expire", self.fleet.expire)
        background.start("audit", self._watch_leaks)
        background.start("announce", self._announce)
        background.start("tidy", self._give_back_memory)
        if self.canary is not None:
            background.start("canary", self.canary.run)
        if self.keys is not None:
            background.start("keys", self.keys.watch)
        await self.leaving.wait()
        log.info("no new requests; %d in progress may finish", self.in_flight.count)
        self.in_flight.begin_drain()
        try:
            async with asyncio.timeout(self.http.shutdown_timeout):
                await self.in_flight.wait_idle()
        except TimeoutError:
            log.warning("%d requests did not end in %g s", self.in_flight.count, self.http.shutdown_timeout)
            self.fleet.refuse_all(Unavailable("the server is shutting down", code="draining", retry_after=5.0))
            self.grammars.close()
            await self.bodies.close()  # those whose bodies have not been read, or grammars not tried, are told as well
            with suppress(TimeoutError):
                await asyncio.wait_for(self.in_flight.wait_idle(), LAST_WORDS_SECONDS)
        await background.stop()
        await self.server.stop()
        self.grammars.close()
        await self.bodies.close()

    async def _announce(self) -> None:
        """Say once that requests can be served, and how to send one."""
        while not self.health()[0]:
            await self.fleet.change()
        host = "localhost" if self.http.host in (*EVERYWHERE, "127.0.0.1") else self.http.host
        scheme = "https" if self.http.ssl_certfile else "http"
        log.info("ready: %s://%s:%d/v1 serves %s", scheme, host, self.server.port, ", ".join(self.served.names))

    async def _give_back_memory(self) -> None:
        """When a crowd of connections has gone, so does the memory it needed, which malloc would keep."""
        most = 0
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            count = len(self.server.table)
            if most - count >= CROWD:
                await asyncio.to_thread(give_back_memory)
                most = count
            most = max(most, count)

    async def _watch_leaks(self) -> None:
        """While nothing runs, look for what has no owner."""
        while True:
            await asyncio.sleep(AUDIT_SECONDS)
            if not self.router.running:
                await self.audit()


def _some(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def served_model(
    path: Path, config: ModelConfig, max_model_len: int, spec: ModelSpec, fingerprint: str | None
) -> ServedModel:
    """How the API presents the model at this path. Raises ValueError where its files cannot be read."""
    own = re.sub(r"[.-]I?(Q\d\w*|F16|BF16|F32)$", "", path.stem) if path.is_file() else path.name
    defaults = sampling_defaults(path) if config.generation_config == "auto" else SamplingDefaults()
    log.info("sampling where a request names none: %s", told(defaults))
    return ServedModel(
        names=config.served_model_name or (own,),
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        created=int(time.time()),
        fingerprint=fingerprint,
        defaults=defaults,
        embedding=embedding_form(path, spec.hidden),
    )
