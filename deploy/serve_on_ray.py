"""What `millrace serve --on ray` runs: the router and the API here, every worker an actor of a Ray cluster.

What a service is told is decided here; where it runs, and that it goes on running, in `deploy.on_ray`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from deploy.children import Children, WorkerGroup, node_flags, worker_flags
from deploy.on_ray.cluster import RayDeployment
from deploy.on_ray.layout import RayGroup, RayLayout
from deploy.on_ray.library import connect
from deploy.on_ray.supervisor import RaySupervisor
from deploy.placement.plan import KVCACHE
from deploy.placement.ray_table import RayReservation, RayTable
from deploy.placement.reservation import node_bundle, worker_bundle
from deploy.runtime.addresses import EVERYWHERE
from deploy.runtime.open_doors import is_loopback
from deploy.runtime.settings import Settings
from deploy.runtime.signals import leave_at_once_on_signals
from deploy.serve import serve_front
from serving.checkpoint.hub import is_hub_name

log = logging.getLogger(__name__)


def serve_on_ray(settings: Settings, children: Children, table: RayTable, address: str | None) -> int:
    """Run until a signal; the exit code. Raises ValueError where there is no cluster, or one has this name already."""
    import uvloop

    if not children.workers:
        raise ValueError("--on ray needs workers: --prefill N --decode M, --mixed N, or a placement file")
    layout = RayLayout.of(ray_groups(settings, children, table), table.sets)
    ray = connect(address, table.name, logs=True)
    leave_at_once_on_signals()  # Ray has put its own handler in place of ours
    try:
        host: str = ray.util.get_node_ip_address()
        if is_loopback(settings.cluster.grpc_host):  # workers of other nodes report here
            settings = replace(settings, cluster=replace(settings.cluster, grpc_host=host))

        def below(own: Settings, _: Children, __: Path, router: str, key: str | None) -> RaySupervisor:
            if own.cluster.grpc_host in EVERYWHERE:
                router = f"{host}:{router.rpartition(':')[2]}"
            drain = own.http.shutdown_timeout
            return RaySupervisor(RayDeployment(ray, layout, table.strategy, router, key, drain, own.logs))

        return uvloop.run(serve_front(settings, children, below))
    finally:
        ray.shutdown()


def ray_groups(settings: Settings, children: Children, table: RayTable) -> list[RayGroup]:
    """The groups with what their services are told and reserve."""
    groups = [_worker_group(group, table.groups.get(group.name, RayReservation())) for group in children.workers]
    if children.nodes:
        own, reserved = children.node_settings or settings, table.groups.get(KVCACHE, RayReservation())
        bundle = node_bundle(reserved)
        command = (KVCACHE, *node_flags(own))
        disk = own.kvcache.disk
        groups.append(
            RayGroup(
                name=KVCACHE,
                kind=KVCACHE,
                count=children.nodes,
                command=command,
                bundle=bundle,
                threads=int(bundle["CPU"]),
                disk=None if disk is None else str(disk),
            )
        )
    return groups


def _worker_group(group: WorkerGroup, reserved: RayReservation) -> RayGroup:
    engine, model = group.settings.engine, group.settings.model_config.of(group.role)
    bundle = worker_bundle(engine, model, reserved)
    pinned = (f"--cpus={engine.cpus}",) if engine.cpus else ()
    command = (group.role.value, *model_words(group.settings.model), *worker_flags(group.settings), *pinned)
    return RayGroup(
        name=group.name,
        kind=group.role.value,
        count=group.count,
        command=command,
        bundle=bundle,
        threads=engine.threads or int(bundle["CPU"]),
    )


def model_words(model: str | None) -> tuple[str, ...]:
    """The model as workers of other nodes are told it: a whole path there, a name of the hub, or nothing."""
    if model is None:
        return ()
    path = Path(model).expanduser()
    if not path.exists() and is_hub_name(model):
        return (model,)
    return (str(path.absolute()),)
