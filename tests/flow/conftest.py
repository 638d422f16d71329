"""Fixtures of the flow tests: a tiny model on disk and in memory, and clusters of every placement in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.local import LocalCluster
from router.fleet import RouterConfig
from router.router import Router
from serving.config import EngineConfig, ModelConfig
from serving.errors import MillraceError
from serving.loader.loading import LoadedModel, load
from serving.messages import Delta, Request, Role
from tests.flow.remote import RemoteCluster
from tests.tiny import tiny_llama


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="package", autouse=True)
def own_step_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of this process learn from no earlier run of the tests, and leave nothing to a later one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("step-costs")
        patch.setattr("deploy.worker.step_costs.cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def shared_model(tiny_path: Path) -> LoadedModel:
    return load(tiny_path, "float32")


@pytest.fixture
def tiny_model(shared_model: LoadedModel) -> Iterator[LoadedModel]:
    """Of all tests: one whose worker gives up the weights that it packs, as a process's does, loads a model itself."""
    yield shared_model
    assert not any(weight.is_meta for weight in shared_model.model.parameters()), "later tests compute by these weights"


class Recorder:
    """An observer that remembers (router.router.RouterObserver)."""

    def __init__(self) -> None:
        self.replacements: list[MillraceError] = []
        self.endings: list[tuple[Request, Delta | None, BaseException | None]] = []
        self.on_replaced: Callable[[MillraceError], None] = lambda error: None

    def first_token(self, request: Request, seconds: float, cached: int) -> None: ...
    def tokens(self, seconds: float, count: int) -> None: ...

    def replaced(self, error: MillraceError) -> None:
        self.replacements.append(error)
        self.on_replaced(error)

    def finished(self, request: Request, timeline: Any, last: Delta | None, error: BaseException | None) -> None:
        self.endings.append((request, last, error))


class Cluster:
    """A router over workers in this process, what it observed, and the wait for idleness every test ends with."""

    def __init__(self, cluster: LocalCluster | RemoteCluster):
        self.cluster = cluster
        self.seen = Recorder()
        self.router: Router = cluster.router(self.seen)

    async def tokens(self, request: Request) -> list[int]:
        """All tokens of a request; checks that it ends once and that nothing is skipped or repeated."""
        found: list[int] = []
        finish = None
        async for delta in self.router.generate(request):
            assert finish is None, "tokens after the end"
            assert delta.index == len(found), "a token was skipped or repeated"
            found += delta.tokens
            finish = delta.finish
        assert finish is not None, "no ending"
        return found

    async def idle(self) -> None:
        """Fails unless nothing is held anywhere within five seconds."""
        for _ in range(500):
            audits = await self.router.audit()
            if all(audit.idle for audit in audits):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not idle: {audits}")

    async def idle_without_retries(self) -> None:
        """All KV is stored, nothing is held, and every request went through at its first try."""
        workers = self.cluster.workers
        for worker in workers:
            if worker.connector is not None:
                await worker.connector.flush(10)
        await self.idle()
        assert self.seen.replacements == []
        assert all(worker.decode is None or worker.decode.refused == {} for worker in workers)


ClusterMaker = Callable[..., Any]

PLACEMENTS = {
    "embedded": (LocalCluster, [Role.MIXED]),
    "embedded-two": (LocalCluster, [Role.MIXED, Role.MIXED]),
    "split-local": (LocalCluster, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]),
    "split-grpc": (RemoteCluster, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]),
    "all-grpc": (RemoteCluster, [Role.MIXED, Role.PREFILL, Role.DECODE]),
}


@pytest.fixture
def make_cluster(tiny_model: LoadedModel) -> ClusterMaker:
    """`async with make_cluster(placement, **engine settings) as cluster`; asserts idleness at the end."""

    @asynccontextmanager
    async def make(
        placement: str,
        *,
        model: LoadedModel | None = None,
        model_config: ModelConfig | None = None,
        router: RouterConfig | None = None,
        **engine: Any,
    ) -> AsyncIterator[Cluster]:
        kind, roles = PLACEMENTS[placement]
        config = EngineConfig(**{"num_kv_blocks": 512, "block_size": 16, **engine})
        router_config = router or RouterConfig(patience=20.0)
        async with kind(
            model or tiny_model, model_config or ModelConfig(), config, router_config, roles=roles
        ) as started:
            cluster = Cluster(started)
            yield cluster
            await cluster.idle()

    return make


@pytest.fixture(params=list(PLACEMENTS))
def placement(request: pytest.FixtureRequest) -> str:
    """Every way a request may be placed and its KV moved."""
    name: str = request.param
    return name
