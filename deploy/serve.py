"""What `millrace serve` and `millrace router` run: a front over workers in process, below it, or elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from deploy.frontend import Frontend, served_model
from deploy.kvcache_process import store_config
from deploy.local import LocalCluster
from deploy.runtime.cpu_binding import parse_cpus, use_cores
from deploy.runtime.http_server import bind
from deploy.runtime.supervisor import ChildSpec, Supervisor
from kvcache.pool.node import PoolNode
from kvcache.pool.store import BlockStore
from router.clients import RemoteWorker
from router.fleet import Fleet, RouterConfig
from router.placement import Placer
from router.policies import make_policy
from router.service import RegistryService
from serving.checkpoint.hub import resolve
from serving.config import (
    ClusterConfig,
    EngineConfig,
    HttpConfig,
    KvCacheConfig,
    ModelConfig,
    PlacementConfig,
    PoolConfig,
)
from serving.loader.loading import open_checkpoint
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from serving.service_class import ServiceClass
from serving.service_config import ServiceConfig
from serving.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

ROUTER_PORT = 8100


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything a command may be configured with."""

    model: str | None
    model_config: ModelConfig
    engine: EngineConfig
    http: HttpConfig
    placement: PlacementConfig
    cluster: ClusterConfig
    pool: PoolConfig
    kvcache: KvCacheConfig
    service: ServiceConfig
    classes: Mapping[str, ServiceClass]  # as the service's file says

    def router_config(self) -> RouterConfig:
        return RouterConfig(
            classes=self.classes,
            default_class=self.service.default_service_class,
            strict_disaggregation=self.service.strict_disaggregation,
            patience=self.placement.queue_patience,
            max_waiting=self.placement.max_waiting,
            silence=self.placement.heartbeat_timeout,
            policy=self.placement.routing_policy,
            prefix_index_bytes=self.placement.prefix_index_memory,
        )


async def serve_embedded(settings: Settings) -> int:
    """One process: a mixed worker, the router and the API; with --disk, a node of the KV pool too."""
    from serving.loader.loading import load

    listening = bind(settings.http.host, settings.http.port)
    use_cores(settings.engine.cpus, settings.engine.threads)
    path = resolve(settings.model)
    log.info("loading %s", path)
    config = settings.model_config
    model, tokenizer = await asyncio.gather(
        asyncio.to_thread(load, path, config.dtype, config.device, config.quantization),
        asyncio.to_thread(load_tokenizer, path),
    )
    node = await own_node(settings)
    cluster = LocalCluster(
        model,
        config,
        settings.engine,
        settings.router_config(),
        roles=[Role.MIXED],
        heartbeat_interval=settings.placement.heartbeat_interval,
        pool=settings.pool,
        pool_nodes={node.address: node} if node is not None else None,
    )
    async with AsyncExitStack() as stack:
        if node is not None:
            stack.push_async_callback(node.stop)
        await stack.enter_async_context(cluster)
        identity = cluster.workers[0].identity
        served = served_model(
            path, config.served_model_name, identity.max_model_len, model.spec.vocab_size, identity.fingerprint
        )
        front = Frontend(cluster.placer, settings.http, served, tokenizer, listening, service=settings.service)
        front.leave_on_signals()
        crash = asyncio.create_task(cluster.workers[0].crashed.wait(), name="crash")
        crash.add_done_callback(lambda _: front.leaving.set())
        stack.callback(crash.cancel)
        await front.run()
        return 1 if cluster.workers[0].loop.crashed else 0


async def own_node(settings: Settings) -> PoolNode | None:
    """The KV pool of a single process, where a folder for it is given: prefixes that outlive a restart."""
    if settings.kvcache.disk is None:
        return None
    store = await asyncio.to_thread(BlockStore, store_config(settings.kvcache))
    return PoolNode("kvcache-0", store, address="local:kvcache-0")


async def serve_front(
    settings: Settings,
    children: Mapping[Role, int],
    child_flags: tuple[str, ...],
    nodes: int = 0,
    node_flags: tuple[str, ...] = (),
) -> int:
    """A router and the API here; workers report over gRPC: our own children, and any others that know the key.

    So do the KV pool's nodes, of which `nodes` are children too.
    """
    listening = bind(settings.http.host, settings.http.port)
    path = resolve(settings.model)
    key = settings.cluster.cluster_key or (secrets.token_hex(16) if children else None)
    config = settings.router_config()
    fleet = Fleet(config, lambda status: _remote(status, key))
    placer = Placer(fleet, make_policy(config.policy))
    door = server(key)
    stubs.add_RegistryServicer_to_server(RegistryService(fleet), door)
    wanted = settings.cluster.grpc_port or (0 if children else ROUTER_PORT)
    port = listen(door, settings.cluster.grpc_host, wanted)
    await door.start()
    log.info("workers report to %s:%d", settings.cluster.grpc_host, port)
    router = f"127.0.0.1:{port}"
    specs = node_specs(nodes, router, settings, node_flags)
    specs += child_specs(path, children, router, settings, child_flags)
    supervisor = Supervisor(specs, {"MILLRACE_CLUSTER_KEY": key or ""} if key else {})
    supervisor.start()
    try:
        front = await asyncio.to_thread(_frontend, placer, settings, path, listening)
        front.leave_on_signals()
        await front.run()
    finally:
        await supervisor.stop(settings.http.shutdown_timeout)
        await fleet.close()
        await door.stop(1.0)
    return 0


def _frontend(placer: Placer, settings: Settings, path: Path, listening: socket.socket) -> Frontend:
    spec, _, _ = open_checkpoint(path)
    limit = min(spec.max_position, settings.model_config.max_model_len or spec.max_position)
    served = served_model(path, settings.model_config.served_model_name, limit, spec.vocab_size, None)
    return Frontend(placer, settings.http, served, load_tokenizer(path), listening, service=settings.service)


def _remote(status: WorkerStatus, key: str | None) -> RemoteWorker:
    return RemoteWorker(Caller(status.address, key))


def child_specs(
    path: Path, children: Mapping[Role, int], router: str, settings: Settings, flags: tuple[str, ...]
) -> list[ChildSpec]:
    """The commands of the children: our own model and worker flags, this router, an even share of the cores."""
    total = sum(children.values())
    cores = sorted(parse_cpus(settings.engine.cpus)) if settings.engine.cpus else None
    threads = settings.engine.threads or max(1, len(cores or os.sched_getaffinity(0)) // max(1, total))
    specs: list[ChildSpec] = []
    for role, count in children.items():
        for number in range(count):
            name = f"{role}-{number}"
            own = ["--routers", router, "--worker-name", name, "--parent", str(os.getpid()), "--threads", str(threads)]
            if cores:
                share = cores[len(specs) * len(cores) // total : (len(specs) + 1) * len(cores) // total] or cores
                own += ["--cpus", ",".join(map(str, share))]
            specs.append(ChildSpec(name=name, arguments=(role.value, str(path), *flags, *own)))
    return specs


def node_specs(count: int, router: str, settings: Settings, flags: tuple[str, ...]) -> list[ChildSpec]:
    """The commands of the KV pool's nodes. They share the disk's path, not a folder of it."""
    specs: list[ChildSpec] = []
    for number in range(count):
        name = f"kvcache-{number}"
        own = ["--routers", router, "--worker-name", name, "--parent", str(os.getpid())]
        if settings.kvcache.disk is not None:
            own.append(f"--disk={Path(settings.kvcache.disk) / name}")
        specs.append(ChildSpec(name=name, arguments=("kvcache", *flags, *own)))
    return specs
