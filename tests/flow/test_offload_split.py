"""Host memory where prefill and decode are workers of their own: KV is handed over while it moves, and lands there.

The same text as with room on the device, whichever ends have host memory, whatever ends a try; nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.worker import DecodeWorker
from deploy.local import LocalCluster
from deploy.worker.worker import Worker
from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk
from kvcache.handoff.dialer import Dialer
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.errors import ContextLengthExceeded, CorruptChunk
from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from tests.flow.conftest import Cluster
from tests.flow.offloading import DEVICE_TOKENS, ROOMY, SMALL, asked, long_prompt, moved
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.remote import RemoteCluster
from tests.tiny import tiny_llama

pytestmark = pytest.mark.thorough


class Local(LocalCluster):
    """Workers in this process, each with the settings of its place in `ends`."""

    ends: Sequence[dict[str, Any]]

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        self.engine_config = EngineConfig(**self.ends[number])
        return super()._worker(role, number, dialer)


class Remote(RemoteCluster):
    """The same behind gRPC servers."""

    ends: Sequence[dict[str, Any]]

    async def _serve(self, role: Role, number: int) -> None:
        self.engine_config = EngineConfig(**self.ends[number])
        await super()._serve(role, number)


@asynccontextmanager
async def split(
    model: LoadedModel,
    prefill: Sequence[dict[str, Any]],
    decode: Sequence[dict[str, Any]],
    *,
    kind: type[Local | Remote] = Local,
) -> AsyncIterator[Cluster]:
    roles = [Role.PREFILL] * len(prefill) + [Role.DECODE] * len(decode)
    cluster = kind(model, ModelConfig(), EngineConfig(), RouterConfig(patience=20.0), roles=roles)
    cluster.ends = [*prefill, *decode]
    async with cluster as started:
        watched = Cluster(started)
        yield watched
        await watched.idle()


class HeldBack:
    """Chunks reach no decode worker before `open` is set. `reached` is set by the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.reached = asyncio.Event(), asyncio.Event()
        receive = DecodeWorker.receive

        async def wait(worker: DecodeWorker, chunk: Chunk, via: str = "") -> None:
            self.reached.set()
            await self.open.wait()
            await receive(worker, chunk, via)

        monkeypatch.setattr(DecodeWorker, "receive", wait)


BOTH = [pytest.param(Local, id="local"), pytest.param(Remote, id="grpc")]
WIDE = {**SMALL, "num_kv_blocks": 24, "block_size": 32}


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        pytest.param(Local, SMALL, SMALL, id="both"),
        pytest.param(Remote, SMALL, SMALL, id="both over grpc"),
        pytest.param(Local, SMALL, ROOMY, id="prefill alone"),
        pytest.param(Local, ROOMY, SMALL, id="decode alone"),
        pytest.param(Local, SMALL, WIDE, id="wider blocks"),
        pytest.param(Local, {**WIDE, "kernels": "torch"}, SMALL, id="torch and narrower blocks"),
    ],
)
async def test_the_text_is_that_of_workers_with_room(
    tiny_model: LoadedModel, kind: type[Local | Remote], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    requests = [asked(f"r{i}", prompt, 20) for i, prompt in enumerate(prompts(4, seed=81, longest=150))]
    requests[1:1] = [asked("long", long_prompt(1500), 24), asked("longer", long_prompt(1100, seed=6), 24)]
    requests.append(asked("one", long_prompt(800, seed=7), 1))  # which takes no lease
    async with split(tiny_model, [ROOMY], [ROOMY]) as cluster:
        expected = [await cluster.tokens(request) for request in requests]
    async with split(tiny_model, [prefill], [decode], kind=kind) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in requests)) == expected
        if prefill is not ROOMY:
            assert moved(cluster, 0) >= 1500 - DEVICE_TOKENS
        assert cluster.seen.replacements == []


@pytest.mark.parametrize("kind", BOTH)
async def test_kv_that_leaves_late_leaves_from_the_host(
    tiny_model: LoadedModel, kind: type[Local | Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker takes nothing until nearly all of the prompt is computed and its oldest KV has moved."""
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 1 << 14)  # few enough in flight that most is still to be read
    prompt = long_prompt(1600)
    held = HeldBack(monkeypatch)
    async with split(tiny_model, [SMALL], [SMALL], kind=kind) as cluster:
        asking = asyncio.create_task(cluster.tokens(asked("long", prompt, 24)))
        while moved(cluster, 0) < 1600 - DEVICE_TOKENS:
            await asyncio.sleep(0.001)
        held.open.set()
        assert is_greedy_tiny(tiny_model.path, prompt, await asking)
        assert cluster.seen.replacements == []


async def test_6000_tokens_with_device_kv_for_1500_at_both_ends(tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path / "tiny", max_position=8192), "float32")
    request = asked("long", long_prompt(6000), 24)
    found = []
    for settings in ({"num_kv_blocks": 400}, {"num_kv_blocks": 1500 // 16, "host_kv_memory": 8 << 20}):
        async with split(model, [settings], [settings], kind=Remote) as cluster:
            found.append(await cluster.tokens(request))
    assert moved(cluster, 0) >= 4500
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("tokens", [None, 0, 3], ids=["computing", "handing over", "decoding"])
async def test_hanging_up_frees_both_hosts(
    tiny_model: LoadedModel, kind: type[Local | Remote], tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldBack(monkeypatch)
    async with split(tiny_model, [SMALL], [SMALL], kind=kind) as cluster:
        stream = cluster.router.generate(asked("r", long_prompt(1300), 400))
        first = asyncio.ensure_future(anext(stream))
        await held.reached.wait()
        if tokens is None:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        else:
            if tokens:
                held.open.set()
            await first
            for _ in range(tokens):
                await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        held.open.set()
        await cluster.idle()
        audits = [audit for audit in await cluster.router.audit() if "host_extents" in audit.counts]
        assert len(audits) == 2, "both hosts are audited"
        assert all(audit.counts["host_extents"] == 0 == audit.leaked["host_extents"] for audit in audits)


@pytest.mark.parametrize("kind", BOTH)
async def test_a_chunk_that_is_harmed_on_its_way_into_the_host_is_refused_and_survived(
    tiny_model: LoadedModel, kind: type[Local | Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, receive = long_prompt(1300), DecodeWorker.receive
    harmed: list[Chunk] = []

    async def harm(worker: DecodeWorker, chunk: Chunk, via: str = "") -> None:
        if chunk.start >= 200 and not harmed:
            harmed.append(chunk)
            chunk = replace(chunk, payload=bytes([chunk.payload[0] ^ 1]) + bytes(chunk.payload[1:]))
        await receive(worker, chunk, via)

    monkeypatch.setattr(DecodeWorker, "receive", harm)
    async with split(tiny_model, [SMALL], [SMALL], kind=kind) as cluster:
        assert is_greedy_tiny(tiny_model.path, prompt, await cluster.tokens(asked("r", prompt, 24)))
        decode = cluster.cluster.workers[1].decode
        assert decode is not None and decode.refused["digest"] == 1 and len(harmed) == 1
        assert [type(error) for error in cluster.seen.replacements] == [CorruptChunk]


@pytest.mark.parametrize("decoding", [False, True], ids=["filling", "decoding"])
async def test_a_decode_worker_that_is_lost_is_taken_over_from(
    tiny_model: LoadedModel, decoding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is handed over once more, to the other one, from a host that gives up all it held for the first."""
    held, prompt = HeldBack(monkeypatch), long_prompt(1300)
    async with split(tiny_model, [SMALL], [SMALL, SMALL], kind=Remote) as cluster:
        stream = cluster.router.generate(asked("r", prompt, 60))
        first = asyncio.ensure_future(anext(stream))
        await held.reached.wait()
        if decoding:
            held.open.set()
            tokens = [*(await first).tokens, *(await anext(stream)).tokens]
        lost = next(worker for worker in cluster.cluster.workers if worker.decode and worker.decode.sequences())
        await lose(cluster, lost)
        held.open.set()
        if not decoding:
            tokens = [*(await first).tokens]
        tokens += [token async for delta in stream for token in delta.tokens]
        assert is_greedy_tiny(tiny_model.path, prompt, tokens) and len(tokens) == 60
        assert cluster.seen.replacements != []
        prefill = cluster.cluster.workers[0]
        assert prefill.kv.host is not None and prefill.kv.host.extents.held == 0


async def test_a_prefill_worker_that_is_lost_is_taken_over_from(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lease, its host memory included, begins anew for the other one."""
    held, prompt = HeldBack(monkeypatch), long_prompt(1300)
    async with split(tiny_model, [SMALL, SMALL], [SMALL], kind=Remote) as cluster:
        asking = asyncio.create_task(cluster.tokens(asked("r", prompt, 24)))
        await held.reached.wait()
        *prefill, decode = cluster.cluster.workers
        lost = next(worker for worker in prefill if worker.prefill and worker.prefill.sequences())
        await lose(cluster, lost)
        held.open.set()
        assert is_greedy_tiny(tiny_model.path, prompt, await asking)
        assert cluster.seen.replacements != [] and decode.decode is not None
        assert lost.kv.host is not None and lost.kv.host.extents.held == 0


async def lose(cluster: Cluster, worker: Worker) -> None:
    """Its process is as good as gone: it answers nobody, breaks every call, and reports no more."""
    assert isinstance(cluster.cluster, Remote)
    worker.loop.crashed = True
    await cluster.cluster.servers[cluster.cluster.workers.index(worker)].stop(0)


async def test_a_long_prompt_goes_to_workers_that_can_hold_it(tiny_model: LoadedModel) -> None:
    """At either end, though others are less loaded; and to no host where a device has room."""
    little = {"num_kv_blocks": 48}
    prompt = long_prompt(1300)
    async with split(tiny_model, [little, SMALL], [little, SMALL]) as cluster:
        for _ in range(2):
            assert is_greedy_tiny(tiny_model.path, prompt, await cluster.tokens(asked("r", prompt, 8)))
        assert cluster.seen.replacements == []
        with pytest.raises(ContextLengthExceeded):
            await cluster.tokens(asked("r", [3] * 2048, 4))
    async with split(tiny_model, [SMALL, ROOMY], [SMALL, ROOMY]) as cluster:
        await asyncio.gather(*(cluster.tokens(asked(f"r{n}", prompt, 8)) for n in range(2)))
        assert moved(cluster, 0) == 0 and cluster.cluster.workers[2].decode.handoffs == {}  # type: ignore[union-attr]
