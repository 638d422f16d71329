"""One worker as a process of its own: its gRPC server, its heartbeats, its own small HTTP door, and how it leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from decode.service import DecodeService
from deploy.http_server import HttpServer, bind
from deploy.threads import use_cores
from deploy.worker import Worker
from kvcache.transports import Dialer
from prefill.service import PrefillService
from serving.api.status import status_app
from serving.config import ClusterConfig, EngineConfig, HttpConfig, ModelConfig, PlacementConfig
from serving.errors import MillraceError, Unauthorized
from serving.messages import Role
from serving.metrics import worker_metrics
from serving.model.loading import LoadedModel, load, resolve
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking, listen, server
from serving.wire import audit_to_pb, status_to_pb

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0  # a step this old means the engine is stuck


class WorkerService(stubs.WorkerServicer):
    """Serves `Worker`: what every worker answers."""

    def __init__(self, worker: Worker):
        self.worker = worker

    async def GetAudit(self, request: pb.AuditRequest, context: object) -> pb.AuditReply:
        return pb.AuditReply(audits=[audit_to_pb(self.worker.audit_now())])


class WorkerHost:
    """`run()` until a signal, a crash, or the parent's end (with `parent` set); returns the exit code."""

    def __init__(
        self,
        role: Role,
        model: str | None,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        cluster: ClusterConfig,
        http: HttpConfig,
        placement: PlacementConfig,
        *,
        parent: int | None = None,
    ):
        self.role = role
        self.model = model
        self.model_config = model_config
        self.engine_config = engine_config
        self.cluster = cluster
        self.http = http
        self.placement = placement
        self.parent = parent
        self._leaving = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        use_cores(self.engine_config.cpus, self.engine_config.threads)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leaving.set)
        loaded = await asyncio.to_thread(self._load)
        grpc_server = server(self.cluster.cluster_key)
        port = listen(grpc_server, self.cluster.grpc_host, self.cluster.grpc_port)
        address = self.cluster.advertise or f"{self.cluster.grpc_host}:{port}"
        dialer = Dialer(cluster_key=self.cluster.cluster_key)
        worker = Worker(
            self.role,
            loaded,
            self.model_config,
            self.engine_config,
            name=self.cluster.worker_name,
            address=address,
            dialer=dialer,
            on_crash=self._crashed,
        )
        stubs.add_WorkerServicer_to_server(WorkerService(worker), grpc_server)
        if worker.decode is not None:
            stubs.add_DecodeServicer_to_server(DecodeService(worker.decode), grpc_server)
        if worker.prefill is not None:
            stubs.add_PrefillServicer_to_server(PrefillService(worker.prefill), grpc_server)
        worker.start()
        await grpc_server.start()
        status_door = await self._open_status_door(worker)
        log.info("%s worker %s listens on %s", self.role, worker.identity.name, address)
        beating = asyncio.create_task(self._report(worker), name="heartbeats")
        await self._leaving.wait()
        if not self._exit_code:
            await self._leave(worker)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        if status_door is not None:
            await status_door.stop()
        await grpc_server.stop(1.0)
        await dialer.close()
        if not self._exit_code:
            await worker.stop()
        return self._exit_code

    def _load(self) -> LoadedModel:
        config = self.model_config
        return load(resolve(self.model), config.dtype, config.device, config.quantization)

    def _crashed(self) -> None:
        self._exit_code = 1
        self._leaving.set()

    async def _leave(self, worker: Worker) -> None:
        """Routers hear at once that we drain; then what is here ends or moves."""
        log.info("%s drains", worker.identity.name)
        draining = asyncio.create_task(worker.drain(self.http.shutdown_timeout))
        await asyncio.sleep(0)
        await asyncio.gather(*(self._beat_once(worker, caller) for caller in self._callers), return_exceptions=True)
        await draining
        log.info("%s leaves", worker.identity.name)

    async def _open_status_door(self, worker: Worker) -> HttpServer | None:
        if self.cluster.metrics_port is None:
            return None
        app = status_app(
            health=lambda: health_of(worker),
            metrics_text=worker_metrics(self.model_config.served_model_name or worker.identity.model, worker.status),
            audit=lambda: worker.audit_now().counts,
        )
        door = HttpServer(app, bind(self.http.host, self.cluster.metrics_port))
        await door.start()
        return door

    # ---- heartbeats --------------------------------------------------------------------------------------------

    async def _report(self, worker: Worker) -> None:
        """Tell every router how we are, until cancelled; leave when the parent is gone."""
        addresses = [address.strip() for address in self.cluster.routers.split(",") if address.strip()]
        self._callers = [Caller(address, self.cluster.cluster_key) for address in addresses]
        try:
            while True:
                await asyncio.gather(*(self._beat_once(worker, caller) for caller in self._callers))
                if self.parent is not None and os.getppid() != self.parent:
                    log.warning("the process that started this worker is gone")
                    self._leaving.set()
                await asyncio.sleep(self.placement.heartbeat_interval)
        finally:
            for caller in self._callers:
                await caller.close()

    async def _beat_once(self, worker: Worker, caller: Caller) -> None:
        try:
            with asking(caller.address):
                stub = stubs.RegistryStub(caller.channel)
                timeout = max(1.0, self.placement.heartbeat_interval)
                await stub.Heartbeat(status_to_pb(worker.status()), metadata=caller.metadata, timeout=timeout)
        except Unauthorized as error:
            log.error("router %s refuses this worker: %s", caller.address, error.message)
        except MillraceError as error:
            log.debug("router %s does not answer: %s", caller.address, error.message)


def health_of(worker: Worker) -> tuple[bool, str]:
    """Whether the worker can take work, and why not."""
    if worker.loop.crashed:
        return False, "the engine died"
    if worker.draining:
        return False, "draining"
    if worker.engine.stalled_seconds > STALLED_SECONDS:
        return False, f"a step has been running for {worker.engine.stalled_seconds:.0f} s"
    return True, "ok"
