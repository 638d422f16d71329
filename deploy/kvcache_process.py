"""One node of the KV pool as a process of its own: its store, its gRPC server, its heartbeats, and how it leaves.

It serves no model and loads none: blocks are bytes here.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from deploy.runtime.addresses import announced
from deploy.runtime.discovery import peers_of
from deploy.runtime.heartbeats import Heartbeats
from deploy.runtime.kv_transports import kv_transport_of
from deploy.runtime.lookups import in_a_daemon
from deploy.runtime.open_doors import check_grpc
from deploy.runtime.settings import Settings
from deploy.runtime.signals import on_signals
from kvcache.pool.disk import NAMESPACE
from kvcache.pool.node import PoolNode
from kvcache.pool.service import PoolService
from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from kvcache.transfer.choice import AUTO
from serving.background import BackgroundTasks
from serving.certificate_metrics import with_certificates
from serving.config import KvCacheConfig
from serving.grpc_tls import grpc_tls
from serving.malloc import keep_freed_memory
from serving.messages import PoolReport
from serving.options import parse_bytes
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as registry
from serving.proto import pool_pb2 as pool
from serving.rpc import Caller, listen, server
from serving.trace_metrics import with_spans
from serving.tracing_config import TRACE_COUNTS
from serving.wire import to_pb
from serving.worker_metrics import pool_metrics

log = logging.getLogger(__name__)


class KvcacheProcess:
    """`run()` until a signal or the parent's end (with `parent` set); returns the exit code."""

    def __init__(self, settings: Settings, *, parent: int | None = None):
        self.settings = settings
        self.store_config = store_config(settings.kvcache)
        self.cluster = settings.cluster
        self.parent = parent
        self.tls = grpc_tls(settings.security)
        self._leaving = asyncio.Event()
        self._last: PoolReport | None = None

    async def run(self) -> int:
        check_grpc(self.cluster, self.settings.security)
        grpc_server = server(self.cluster.cluster_key, self.tls)
        port = listen(grpc_server, self.cluster.grpc_host, self.cluster.grpc_port, self.tls)
        address = await in_a_daemon(partial(announced, self.cluster, port, peers_of(self.cluster.routers)))
        on_signals(self._leaving.set)  # before this, a signal ends the process at once
        keep_freed_memory()
        name = self.cluster.worker_name or address  # what its share of the keys is drawn by: the same at every start
        store = await asyncio.to_thread(BlockStore, self.store_config)
        node = PoolNode(name, store, address=address)
        service = PoolService(node, kv_transport_of(AUTO, self.cluster, self.settings.security))
        service.add_to(grpc_server)
        async with AsyncExitStack() as stack:
            stack.callback(service.close)
            stack.push_async_callback(grpc_server.stop, 1.0)
            stack.push_async_callback(node.stop)
            await self._open_status_door(node, stack)  # first what may fail
            await grpc_server.start()
            log.info("pool node %s listens on %s", name, address)
            self._warn_of_names(name, port)
            await self._serve(node)
        log.info("pool node %s leaves", name)
        return 0

    async def _serve(self, node: PoolNode) -> None:
        """Report to the routers until it is time to leave, then drain: calls in progress end."""
        heartbeats = Heartbeats(
            lambda caller, seconds: self._beat(node, caller, seconds),
            self.cluster,
            self.settings.placement,
            parent=self.parent,
            orphaned=self._leaving.set,
            tls=self.tls,
        )
        beating = asyncio.create_task(heartbeats.run(), name="heartbeats")
        background = BackgroundTasks()
        background.start("figures", lambda: self._watch(node))
        await self._leaving.wait()
        log.info("pool node %s drains", node.name)
        await heartbeats.during(node.drain(self.settings.http.shutdown_timeout))
        beating.cancel()
        await asyncio.gather(beating, background.stop(), return_exceptions=True)

    async def _beat(self, node: PoolNode, caller: Caller, seconds: float) -> pb.HeartbeatReply:
        report = to_pb(await node.report(), pool.PoolStat)
        stub = registry.RegistryStub(caller.channel)
        reply: pb.HeartbeatReply = await stub.PoolHeartbeat(report, metadata=caller.metadata, timeout=seconds)
        return reply

    async def _watch(self, node: PoolNode) -> None:
        """Keep the figures of our own /metrics fresh, whether or not a router is told of them."""
        while True:
            self._last = await node.report()
            await asyncio.sleep(self.settings.placement.heartbeat_interval)

    def _warn_of_names(self, name: str, port: int) -> None:
        """Its share of the keys is drawn by its name: under another one, most of what its disk holds is never found."""
        if self.store_config.disk_path is not None and name.endswith(f":{port}") and not self.cluster.grpc_port:
            log.warning("the name of this node is its port, another one after a restart: give it a --worker-name")

    async def _open_status_door(self, node: PoolNode, stack: AsyncExitStack) -> None:
        if self.cluster.metrics_port is None:
            return
        from deploy.runtime.http_server import open_status_door  # FastAPI and uvicorn: a part of a start
        from serving.api.status import status_app

        prefix = self.settings.http.metrics_prefix
        self._last = first = await node.report()
        app = status_app(
            health=lambda: (False, "draining") if node.draining else (True, "ok"),
            metrics_text=with_spans(
                with_certificates(pool_metrics(lambda: self._last or first, prefix), self.tls, prefix),
                TRACE_COUNTS,
                prefix,
            ),
            audit=lambda: {"calls": node.calls, "puts": node.puts},
        )
        await open_status_door(app, self.settings.http, self.cluster.metrics_port, stack)


def store_config(config: KvCacheConfig) -> StoreConfig:
    """What the store is told. Raises ValueError naming the flag at fault."""
    if config.ram == 0 and config.disk is None:
        raise ValueError("--ram 0 without --disk leaves a pool node no room; give it one of them")
    quotas, room = parse_quotas(config.quota), config.ram if config.disk is None else config.disk_size
    if sum(quotas.values()) > room or config.default_quota > room:
        flag = "--ram" if config.disk is None else "--disk-size"
        raise ValueError(f"--quota and --default-quota promise more than the {room} bytes of {flag}: lower them")
    return StoreConfig(
        ram_bytes=config.ram,
        disk_path=Path(config.disk) if config.disk is not None else None,
        disk_bytes=config.disk_size if config.disk is not None else 0,
        write="back" if config.disk_write == "back" else "through",
        quotas=quotas,
        default_quota=config.default_quota,
        backlog=config.disk_backlog,
    )


def parse_quotas(text: str | None) -> dict[str, int]:
    """`default=1GiB,0123456789abcdef=512MiB` → bytes by namespace. Raises ValueError."""
    quotas: dict[str, int] = {}
    for part in (text or "").split(","):
        if part.strip():
            name, equals, size = part.rpartition("=")
            if not equals or not name.strip():
                raise ValueError(f"--quota: {part.strip()!r} is not a namespace and its bytes, such as default=1GiB")
            if not NAMESPACE.fullmatch(name.strip()) or name.strip() in quotas:
                raise ValueError(f"--quota: {name.strip()!r} cannot name a namespace, or has two quotas")
            try:
                quotas[name.strip()] = parse_bytes(size)
            except ValueError as error:
                raise ValueError(f"--quota: {error}") from None
    return quotas
