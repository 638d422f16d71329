"""What `millrace serve` and `millrace router` run: a front over workers in process, below it, or elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.chat_template import read_chat_template
from deploy.children import Children, child_specs, node_specs
from deploy.control.below import Below, ChildProcesses
from deploy.control.fleet_control import FleetControl
from deploy.control.service import ControlService, FlipCalls
from deploy.kvcache_process import store_config
from deploy.router_snapshot import SnapshotFile, SnapshotKeeper, snapshot_file
from deploy.runtime.addresses import near
from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.devices import use_device, visible_devices
from deploy.runtime.http_server import bind, open_status_door
from deploy.runtime.open_doors import check_api, check_grpc
from deploy.runtime.settings import Settings
from deploy.runtime.signals import on_signals
from deploy.runtime.supervisor import CHILD_MODULE, Supervisor
from kvcache.pool.node import PoolNode
from kvcache.pool.store import BlockStore
from router.clients import RemoteWorker
from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import make_policy
from router.service import RegistryService
from serving.checkpoint.hub import resolve
from serving.checkpoint.read_spec import read_spec
from serving.checkpoint.safetensors_files import check_weights
from serving.collecting import loading_modules
from serving.config import ModelConfig
from serving.grpc_tls import GrpcTls, grpc_tls
from serving.malloc import give_back_freed_memory, keep_freed_memory
from serving.messages import Role
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from serving.service_config import configured_classes
from serving.text.tokenizer import load_tokenizer

if TYPE_CHECKING:  # FastAPI and torch come with them
    from deploy.frontend import Frontend
    from deploy.worker.build import MakeForward

log = logging.getLogger(__name__)

ROUTER_PORT = 8100
PRELOAD = ("deploy.worker.process", "uvloop")  # for workers that are forked: all that they import
CANARY_SECONDS = 2.0  # without traffic, unless --canary-interval says otherwise


def router_config(settings: Settings) -> RouterConfig:
    placement, service = settings.placement, settings.service
    return RouterConfig(
        patience=placement.queue_patience,
        max_waiting=placement.max_waiting,
        silence=placement.heartbeat_timeout,
        policy=placement.routing_policy,
        prefix_index_bytes=placement.prefix_index_memory,
        classes=configured_classes(service),
        default_class=service.default_service_class,
        strict_disaggregation=service.strict_disaggregation,
    )


async def serve_embedded(settings: Settings, make_forward: MakeForward | None = None) -> int:
    """One process: a mixed worker, the router and the API; with --disk, a node of the KV pool too.

    Steps are computed by what `make_forward` makes; None: by the form that fits the model, which it gives up for that.
    """
    with loading_modules():
        from deploy.frontend import Frontend, served_model
        from deploy.local import LocalCluster  # torch comes with it, which a front without a worker does not need
        from deploy.worker.computing import KeptForward
        from deploy.worker.model_cache import load_from, release
        from deploy.worker.rank_hosts import rank_hosts

    check_api(settings.http, settings.service, settings.security)
    template = read_chat_template(settings.http.chat_template)
    listening = bind(settings.http.host, settings.http.port)
    use_cores(settings.engine.cpus, settings.engine.threads)
    path, config = resolve(settings.model), use_device(settings.model_config, os.environ)
    log.info("loading %s", path)
    give_back_freed_memory()
    began = time.monotonic()
    model, tokenizer = await asyncio.gather(
        asyncio.to_thread(load_from, path, config, rank_hosts(settings)),
        asyncio.to_thread(load_tokenizer, path, template),
    )
    log.info("%s loaded from disk in %.2f s", path.name, time.monotonic() - began)
    node = await own_node(settings)
    cluster = LocalCluster(
        model,
        config,
        settings.engine,
        router_config(settings),
        heartbeat_interval=settings.placement.heartbeat_interval,
        pool=settings.pool,
        pool_nodes={node.address: node} if node is not None else None,
        make_forward=make_forward or KeptForward(),
    )
    async with AsyncExitStack() as stack:
        stack.callback(release, model)
        if node is not None:
            stack.push_async_callback(node.stop)
        await stack.enter_async_context(cluster)
        keep_freed_memory()
        own = cluster.workers[0].identity
        served = served_model(path, config, own.max_model_len, model.spec, own.fingerprint)
        front = Frontend(
            cluster.placer,
            settings.http,
            served,
            tokenizer,
            listening,
            service=settings.service,
            canary_interval=settings.placement.canary_interval or 0.0,
            restarts=cluster.restarts,
        )
        front.leave_on_signals()
        crash = asyncio.create_task(cluster.workers[0].crashed.wait(), name="crash")
        crash.add_done_callback(lambda _: front.leaving.set())
        stack.callback(crash.cancel)
        await _run(front, settings)
        return int(cluster.workers[0].loop.crashed)


async def own_node(settings: Settings) -> PoolNode | None:
    """The KV pool of a single process, where a folder for it is given: prefixes that outlive a restart."""
    if settings.kvcache.disk is None:
        return None
    store = await asyncio.to_thread(BlockStore, store_config(settings.kvcache))
    return PoolNode("kvcache-0", store, address="local:kvcache-0")


def children_below(
    settings: Settings, children: Children, path: Path, router: str, key: str | None, module: str = CHILD_MODULE
) -> Below:
    """Workers and nodes as child processes of this one, which run `module` and report to `router`."""
    specs = node_specs(children.nodes, router, children.node_settings or settings)
    specs += child_specs(path, children.workers, router)
    several = sum(group.count for group in children.workers) > 1
    supervisor = Supervisor(
        specs,
        {"MILLRACE_CLUSTER_KEY": key} if key else {},
        module,
        forking=tuple(Role) if several and not visible_devices(os.environ) else (),
        preload=PRELOAD,
    )
    return ChildProcesses(supervisor, settings.http.shutdown_timeout)


MakeBelow = Callable[[Settings, Children, Path, str, str | None], Below]


async def serve_front(settings: Settings, children: Children, below: MakeBelow = children_below) -> int:
    """A router and the API here; workers report over gRPC: those `below` it, and any others that know the key.

    So do the KV pool's nodes.
    """
    check_api(settings.http, settings.service, settings.security)
    key = settings.cluster.cluster_key or (secrets.token_hex(16) if children.workers else None)
    check_grpc(dataclasses.replace(settings.cluster, cluster_key=key), settings.security)
    tls = grpc_tls(settings.security)
    template = read_chat_template(settings.http.chat_template)
    listening = bind(settings.http.host, settings.http.port)
    path = resolve(settings.model)
    for group in children.workers:
        config = group.settings.model_config.of(group.role)
        _check_model(path, config)
        if config.load_format != "pool":
            check_weights(path)  # else each worker would begin, find that, end and begin again
    if not children.workers:
        _check_model(path, settings.model_config.of(Role.MIXED))
    routing = router_config(settings)
    fleet = Fleet(routing, lambda status: RemoteWorker(Caller(status.address, key, tls)))
    placer = Placer(fleet, make_policy(routing.policy))
    keeper = _keeper(placer, settings, path)
    door = server(key, tls)
    stubs.add_RegistryServicer_to_server(RegistryService(fleet), door)
    wanted = settings.cluster.grpc_port or (0 if children.workers else ROUTER_PORT)
    port = listen(door, settings.cluster.grpc_host, wanted, tls)
    router = f"{near(settings.cluster.grpc_host)}:{port}"
    supervisor = below(settings, children, path, router, key)
    control = FleetControl(fleet, supervisor, FlipCalls(key, tls, settings.http.shutdown_timeout))
    stubs.add_ControlServicer_to_server(ControlService(control), door)
    await door.start()
    log.info("workers report to %s:%d", settings.cluster.grpc_host, port)
    early = asyncio.Event()
    on_signals(early.set)  # from now on there are children to be told
    supervisor.start()
    try:
        front = await asyncio.to_thread(_frontend, placer, settings, path, template, listening, tls)
        front.leave_on_signals()
        await asyncio.sleep(0)  # a signal that came before may still be told of
        if not early.is_set():
            await _run(front, settings)
    finally:
        if keeper is not None:
            await keeper.stop()
        await supervisor.stop(settings.http.shutdown_timeout)
        await fleet.close()
        await door.stop(1.0)
    return 0


def _check_model(path: Path, config: ModelConfig) -> None:
    """As `deploy.worker.model_cache.check_model`, which needs torch: asked where there is something to check."""
    if config.device == "cpu" and not config.rank_flags:
        return
    from deploy.worker.model_cache import check_model

    check_model(path, config)


async def _run(front: Frontend, settings: Settings) -> None:
    """Serve, and beside the API, where --metrics-port asks for it, probes and scrapes that show no certificate."""
    async with AsyncExitStack() as stack:
        if settings.cluster.metrics_port is not None:
            from serving.api.status import status_app

            app = status_app(health=front.health, metrics_text=front.metrics_text)
            plain = dataclasses.replace(
                settings.http, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None, ssl_cert_reqs="0"
            )
            await open_status_door(app, plain, settings.cluster.metrics_port, stack)
        await front.run()


def _keeper(placer: Placer, settings: Settings, path: Path) -> SnapshotKeeper | None:
    """Goes on from the last snapshot, and keeps the next ones; None where there are to be none."""
    wanted = settings.placement.router_snapshot
    if wanted == "never":
        return None
    file = SnapshotFile(Path(wanted))
    if wanted == "auto":
        file = snapshot_file(str(path), settings.http.host, settings.http.port)
    keeper = SnapshotKeeper(placer, file)
    keeper.load()
    keeper.start()
    return keeper


def _frontend(
    placer: Placer,
    settings: Settings,
    path: Path,
    template: str | None,
    listening: socket.socket,
    tls: GrpcTls | None,
) -> Frontend:
    with loading_modules():
        from deploy.frontend import Frontend, served_model  # while the children start: they need as long themselves

    spec = read_spec(path)
    limit = min(spec.max_position, settings.model_config.max_model_len or spec.max_position)
    served = served_model(path, settings.model_config, limit, spec, None)
    given = settings.placement.canary_interval
    canary = CANARY_SECONDS if given is None else given
    return Frontend(
        placer,
        settings.http,
        served,
        load_tokenizer(path, template),
        listening,
        service=settings.service,
        canary_interval=canary,
        grpc_files=tls.files if tls is not None else None,
    )
