"""One worker as a process of its own: its gRPC server, its heartbeats, its own small HTTP door, and how it leaves."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial

from decode.service import DecodeService
from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.heartbeats import Heartbeats, addresses
from deploy.runtime.http_server import HttpServer, bind
from deploy.worker.model_cache import ModelCache
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from kvcache.pool.remote import RemoteNode
from kvcache.transfer.choice import lenders_for, lenders_on_demand
from kvcache.transfer.lent_memory import MemoryLenders
from prefill.service import PrefillService
from serving.api.status import status_app
from serving.config import ClusterConfig, EngineConfig, HttpConfig, ModelConfig, PlacementConfig, PoolConfig
from serving.malloc import keep_freed_memory
from serving.messages import Role
from serving.metrics import worker_metrics
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from serving.wire import audit_to_pb, status_to_pb

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0  # a step this old means the engine is stuck


class WorkerService(stubs.WorkerServicer):
    """Serves `Worker`: what every worker answers."""

    def __init__(self, worker: Worker):
        self.worker = worker

    async def GetAudit(self, request: pb.AuditRequest, context: object) -> pb.AuditReply:
        return pb.AuditReply(audits=[audit_to_pb(self.worker.audit_now())])


class WorkerProcess:
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
        pool: PoolConfig,
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
        self.pool = pool
        self.parent = parent
        self.on_pool_nodes: Callable[[list[str]], None] | None = None  # told whenever the KV pool's nodes change
        self._leaving = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        use_cores(self.engine_config.cpus, self.engine_config.threads)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leaving.set)
        model = ModelCache(self.model, self.model_config, self.pool, self.cluster)
        loaded = await model.load()
        grpc_server = server(self.cluster.cluster_key)
        port = listen(grpc_server, self.cluster.grpc_host, self.cluster.grpc_port)
        address = self.cluster.advertise or f"{self.cluster.grpc_host}:{port}"
        keep_freed_memory()
        transport = self.engine_config.kv_transport
        dialer = Dialer(cluster_key=self.cluster.cluster_key, kv_transport=transport)
        if self.role is not Role.DECODE:
            await dialer.prepare()
        lenders = lenders_for(transport) if self.role is not Role.PREFILL else MemoryLenders()
        lent = lenders_on_demand(transport)
        worker = Worker(
            self.role,
            loaded,
            self.model_config,
            self.engine_config,
            name=self.cluster.worker_name,
            address=address,
            dialer=dialer,
            on_crash=self._crashed,
            pool_config=self.pool,
            pool_link=lambda node: RemoteNode(Caller(node, self.cluster.cluster_key), lenders=lent),
        )
        if worker.connector is not None:
            self.on_pool_nodes = worker.connector.set_nodes
        stubs.add_WorkerServicer_to_server(WorkerService(worker), grpc_server)
        if worker.decode is not None:
            worker.decode.lenders = lenders
            DecodeService(worker.decode).add_to(grpc_server)
        stubs.add_PrefillServicer_to_server(PrefillService(worker.prefill), grpc_server)
        worker.start()
        await grpc_server.start()
        status_door = await self._open_status_door(worker)
        log.info("%s worker %s listens on %s", self.role, worker.identity.name, address)
        heartbeats = Heartbeats(
            partial(self._beat, worker),
            self.cluster,
            self.placement,
            fixed_nodes=addresses(self.pool.kvcache_nodes),
            on_pool_nodes=self._pool_nodes,
            parent=self.parent,
            orphaned=self._leaving.set,
        )
        beating = asyncio.create_task(heartbeats.run(), name="heartbeats")
        storing = asyncio.create_task(model.store(), name="store-model")
        await self._leaving.wait()
        if not self._exit_code:
            await self._leave(worker, heartbeats)
        for task in (beating, storing):
            task.cancel()
        await asyncio.gather(beating, storing, return_exceptions=True)
        if status_door is not None:
            await status_door.stop()
        await grpc_server.stop(1.0)
        await dialer.close()
        lenders.close()
        if not self._exit_code:
            await worker.stop()
        lent.close()
        return self._exit_code

    def _crashed(self) -> None:
        self._exit_code = 1
        self._leaving.set()

    async def _leave(self, worker: Worker, heartbeats: Heartbeats) -> None:
        """Routers hear at once that we drain; then what is here ends or moves."""
        log.info("%s drains", worker.identity.name)
        draining = asyncio.create_task(worker.drain(self.http.shutdown_timeout))
        await asyncio.sleep(0)
        await heartbeats.once()
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
        door = HttpServer(app, bind(self.http.host, self.cluster.metrics_port), send_timeout=self.http.send_timeout)
        await door.start()
        return door

    async def _beat(self, worker: Worker, caller: Caller, seconds: float) -> pb.HeartbeatReply:
        stub = stubs.RegistryStub(caller.channel)
        reply: pb.HeartbeatReply = await stub.Heartbeat(
            status_to_pb(worker.status()), metadata=caller.metadata, timeout=seconds
        )
        return reply

    def _pool_nodes(self, nodes: list[str]) -> None:
        log.info("the KV pool is %s", ", ".join(nodes) or "gone")
        if self.on_pool_nodes is not None:
            self.on_pool_nodes(nodes)


def health_of(worker: Worker) -> tuple[bool, str]:
    """Whether the worker can take work, and why not."""
    if worker.loop.crashed:
        return False, "the engine died"
    if worker.draining:
        return False, "draining"
    if worker.engine.stalled_seconds > STALLED_SECONDS:
        return False, f"a step has been running for {worker.engine.stalled_seconds:.0f} s"
    return True, "ok"
