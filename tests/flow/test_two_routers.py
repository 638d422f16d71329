"""Two routers over the same workers, as processes: no worker is over-committed, either router may die, and every worker
may be replaced under streams that last longer than that. Texts stay exact and no request fails.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import wait_until
from tests.flow.services import RouterService, Services
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

SEQS = 6  # that a worker holds at most
BLOCKS = 440  # of 16 tokens: five of the prompts that fill the workers
LENGTH = 16384  # of a context: more than a stream writes while the test lasts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=16, max_position=LENGTH)


@pytest.fixture(scope="module")
def services(model: Path) -> Iterator[Services]:
    """A worker of each role, whose steps take a while however small the model is; a draining one soon hands back."""
    with Services(model, 2, ("prefill", "decode", "mixed"), *flags_of(BLOCKS)) as started:
        yield started


def flags_of(blocks: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of routers, and of workers with so many KV blocks."""
    common = ("--heartbeat-interval", "0.2", "--served-model-name", "tiny")
    workers = ("--dtype", "float32", "--kernels", "torch", "--threads", "1", "--max-num-seqs", str(SEQS))
    workers += ("--num-kv-blocks", str(blocks), "--num-speculative-tokens", "0", "--shutdown-timeout", "0.3")
    return (*common, "--canary-interval", "0.5"), (*common, *workers)


class Stream:
    """A completion, greedy unless a temperature is given, read in the background until it ends or is left.

    One with a `key` can go on elsewhere when it breaks off.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        router: RouterService,
        prompt: Sequence[int],
        count: int,
        *,
        temperature: float = 0.0,
        key: str = "",
    ):
        self.prompt = list(prompt)
        self.count = count
        self.tokens: list[int] = []
        self.ended = False
        self._client = client
        self._body = {"model": "tiny", "prompt": self.prompt, "max_tokens": count, "temperature": temperature}
        self._headers = {"idempotency-key": key} if key else {}
        self.go_on(router)

    def go_on(self, router: RouterService) -> None:
        """Ask for the stream, from the last event on that came."""
        self.task = asyncio.create_task(self._read(f"{router.url}/v1/completions"))

    async def _read(self, url: str) -> None:
        body = {**self._body, "stream": True, "return_token_ids": True}
        async with self._client.stream("POST", url, json=body, headers=self._headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            mark = ""
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    mark = line[4:]
                elif line == "data: [DONE]":
                    self.ended = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    self.tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]
                    self._headers |= {"last-event-id": mark} if mark else {}  # not before its event is here
        assert self.ended, "the stream broke off"

    async def whole(self) -> None:
        """To its end, which is that of its length."""
        await self.task
        assert len(self.tokens) == self.count

    async def leave(self) -> None:
        """Hang up. It must not have ended by itself."""
        assert not self.task.done(), self.task.exception() or f"it ended after {len(self.tokens)} tokens"
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as made:
        yield made


async def begun(streams: Sequence[Stream], tokens: int) -> None:
    """Every stream has come so far."""
    await reached([(stream, tokens) for stream in streams])


async def gone_further(streams: Sequence[Stream], tokens: int) -> None:
    """Every stream has so many tokens more than it has now, however far each is."""
    await reached([(stream, len(stream.tokens) + tokens) for stream in streams])


async def reached(goals: Sequence[tuple[Stream, int]]) -> None:
    streams = [stream for stream, _ in goals]
    async with asyncio.timeout(60):
        while any(len(stream.tokens) < tokens for stream, tokens in goals):
            for stream in streams:
                if stream.task.done():
                    stream.task.result()
            await asyncio.sleep(0.02)


def check_texts(model: Path, streams: Sequence[Stream]) -> None:
    for stream in streams:
        assert is_greedy_tiny(model, stream.prompt, stream.tokens)


def check_samples(router: RouterService) -> None:
    """Each metric is there once for each worker, though the life before of one may not be forgotten yet."""
    lines = router.get("/metrics")[1].decode().splitlines()
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert sorted(set(samples)) == sorted(samples)


async def wait_idle(services: Services) -> None:
    for router in services.routers:
        await asyncio.to_thread(router.wait_idle)


async def test_routers_that_fill_the_workers_at_once_commit_no_more_than_there_is(
    services: Services, client: httpx.AsyncClient, model: Path
) -> None:
    """The workers' own counts decide. A request that one refuses finds the other, or waits; none fails."""
    for seed in (50, 54, 55, 56):
        asked = prompts(14, shortest=1000, longest=1500, seed=seed)
        streams = [Stream(client, services.routers[n % 2], prompt, 24) for n, prompt in enumerate(asked)]
        most = {"leases": 0, "blocks": 0}
        while not all(stream.task.done() for stream in streams):
            for name in ("decode-0", "mixed-0"):
                counts = await asyncio.to_thread(services.workers[name].counts)
                most = {kind: max(held, counts[kind]) for kind, held in most.items()}
            await asyncio.sleep(0.01)
        for stream in streams:
            await stream.whole()
        check_texts(model, streams)
        await wait_idle(services)
        assert most["leases"] <= SEQS and most["blocks"] <= BLOCKS
        refused = [await asyncio.to_thread(router.metric, "leases_refused_total") for router in services.routers]
        if min(refused) > 0:  # else they have not met, and are to do so again
            break
    assert min(refused) > 0, "both routers hear of the leases that were refused"
    assert [router.metric("request_failure_total") for router in services.routers] == [0, 0]


async def test_a_router_dies_and_comes_back(services: Services, client: httpx.AsyncClient, model: Path) -> None:
    """Streams that it held go on at the other one where they broke off, sampled ones as well."""
    first, second = services.routers
    asked = prompts(6, shortest=20, longest=100, seed=51)
    before = second.metric("replacements_total")
    lost = [Stream(client, first, prompt, 400, key=f"lost-{n}") for n, prompt in enumerate(asked[:2])]
    lost.append(Stream(client, first, asked[2], 400, temperature=1.0, key="lost-warm"))
    kept = [Stream(client, second, prompt, LENGTH // 2) for prompt in asked[3:]]
    await begun([*lost, *kept], 10)
    assert sum(services.held().values()) >= 6  # and the canary's
    await asyncio.to_thread(first.kill)
    await asyncio.to_thread(wait_until, lambda: sum(services.held().values()) <= 3, 15.0, "its leases are given up")
    assert not any(stream.task.done() for stream in kept), "they were meant to last longer"
    ends = await asyncio.gather(*(stream.task for stream in lost), return_exceptions=True)
    assert all(isinstance(end, httpx.HTTPError) for end in ends), f"they were meant to break off: {ends}"
    for stream in lost:
        stream.go_on(second)
    first.start()
    for stream in lost:
        await stream.whole()
    for stream in kept:
        await stream.leave()
    check_texts(model, [*lost[:2], *kept])
    warm = Stream(client, second, asked[2], 400, temperature=1.0, key="lost-warm")
    await warm.whole()
    assert warm.tokens == lost[2].tokens and not is_greedy_tiny(model, warm.prompt, warm.tokens)
    assert second.metric("replacements_total") == before
    await asyncio.to_thread(services.wait_known, first, 20.0)
    again = Stream(client, first, asked[0], 20)
    await again.whole()
    check_texts(model, [again])
    await wait_idle(services)


async def test_every_worker_is_replaced_under_streams_that_last_longer(
    services: Services, client: httpx.AsyncClient, model: Path
) -> None:
    """What a leaving worker has not finished goes on elsewhere, and new requests are served all the while."""
    asked = prompts(6, shortest=20, longest=100, seed=52)
    streams = [Stream(client, services.routers[n % 2], prompt, LENGTH // 2) for n, prompt in enumerate(asked[:4])]
    short: list[Stream] = []
    await begun(streams, 10)
    lives = {worker.process.pid for worker in services.workers.values()}
    for name in ("decode-0", "mixed-0", "prefill-0"):
        rolling = asyncio.create_task(asyncio.to_thread(services.replace, name, 20.0))
        while not rolling.done():
            short += [Stream(client, router, asked[4], 10) for router in services.routers]
            await asyncio.gather(*(stream.whole() for stream in short[-2:]))
            await asyncio.wait([rolling], timeout=0.2)
        await rolling
        for router in services.routers:
            check_samples(router)
    assert not lives & {worker.process.pid for worker in services.workers.values()}
    await gone_further(streams, 10)  # they are alive, every one
    for stream in streams:
        await stream.leave()
    check_texts(model, [*streams, *short])
    assert min(router.metric("replacements_total") for router in services.routers) > 0
    assert [router.metric("request_failure_total") for router in services.routers] == [0, 0]
    await wait_idle(services)


async def test_a_router_that_is_told_to_leave_finishes_its_streams(
    services: Services, client: httpx.AsyncClient, model: Path
) -> None:
    """New requests are refused there meanwhile, with when to come again, and go to the other."""
    first, second = services.routers
    asked = prompts(2, shortest=20, longest=100, seed=53)
    stream = Stream(client, first, asked[0], 600)
    await begun([stream], 5)
    first.process.send_signal(signal.SIGTERM)
    body = {"model": "tiny", "prompt": asked[1], "max_tokens": 2}
    began = time.monotonic()
    while (refused := await client.post(f"{first.url}/v1/completions", json=body)).status_code == 200:
        assert time.monotonic() - began < 30.0
    assert refused.status_code == 503 and "retry-after" in refused.headers and first.get("/health")[0] == 503
    elsewhere = Stream(client, second, asked[1], 20)
    await elsewhere.whole()
    await stream.whole()
    check_texts(model, [stream, elsewhere])
    assert await asyncio.to_thread(first.process.wait, 60) == 0, first.log()
    await asyncio.to_thread(second.wait_idle)
