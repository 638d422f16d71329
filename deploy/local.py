"""Everything in one process: workers called directly, heartbeats without a wire. What `millrace serve` starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from deploy.worker.build import MakeForward, WorkerLinks, build_worker
from deploy.worker.computing import KeptForward, forward_of
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from kvcache.pool.links import PoolLink
from router.fleet import Fleet, RouterConfig, WorkerLink
from router.placer import Placer
from router.policies import make_policy
from router.router import Router, RouterObserver
from serving.background import BackgroundTasks
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.loader.loading import LoadedModel
from serving.messages import Role, WorkerStatus


class LocalCluster:
    """A router and workers of these roles over one loaded model, in this process. Use as an async context manager."""

    def __init__(
        self,
        model: LoadedModel,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        router_config: RouterConfig,
        *,
        roles: Sequence[Role] = (Role.MIXED,),
        heartbeat_interval: float = 0.5,
        pool: PoolConfig | None = None,
        pool_nodes: Mapping[str, PoolLink] | None = None,
        make_forward: MakeForward = forward_of,
    ):
        kept = isinstance(make_forward, KeptForward)
        assert not kept or len(roles) == 1, "each worker packs the weights for itself"
        self.model = model
        self.model_config = model_config
        self.engine_config = engine_config
        self.router_config = router_config
        self.roles = roles
        self.heartbeat_interval = heartbeat_interval
        self.pool = pool or PoolConfig()
        self.make_forward = make_forward
        self.pool_nodes = dict(pool_nodes or {})  # the KV pool's nodes by address
        self.fleet = Fleet(router_config, self._link)
        self.placer = Placer(self.fleet, make_policy(router_config.policy))
        self.restarts: Counter[str] = Counter()
        self._background = BackgroundTasks(self.restarts)

    async def start(self) -> None:
        """Build and start the workers on the running event loop."""
        dialer = Dialer(local={})
        self.workers = [self._worker(role, number, dialer) for number, role in enumerate(self.roles)]
        for worker in self.workers:
            if worker.decode is not None:
                dialer.local[worker.address] = worker.decode
            worker.start()
            if worker.connector is not None:
                worker.connector.set_nodes(self.pool_nodes)
        self.beat()
        self._start_beating()

    def _start_beating(self) -> None:
        self._background.every(self.heartbeat_interval, "heartbeats", self.beat)

    def router(self, observer: RouterObserver) -> Router:
        return Router(self.placer, observer)

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        name = f"{role}-{number}"
        pool_link = self.pool_nodes.__getitem__
        links = WorkerLinks(address=f"local:{name}", dialer=dialer, pool=self.pool, pool_link=pool_link)
        parts = (role, self.model, self.model_config, self.engine_config, links)
        return build_worker(*parts, name=name, make_forward=self.make_forward)

    def _link(self, status: WorkerStatus) -> WorkerLink:
        return next(worker for worker in self.workers if worker.identity.instance == status.instance)

    def beat(self) -> None:
        """Every worker that still runs reports."""
        for worker in self.workers:
            if not worker.loop.crashed:
                status = worker.status()
                since = self.fleet.kv_events_since(status.instance)
                self.fleet.heartbeat(status, None if since is None else worker.kv_events(since))
        self.fleet.expire()

    async def stop(self) -> None:
        await self._background.stop()
        await self.fleet.close()
        for worker in self.workers:
            await worker.stop()

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
