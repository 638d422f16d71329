"""Tenants over real workers: another's prefix is a miss in every tier, one's own a hit; limits hold to the token."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from bench.own_server import descendants
from router.fleet import RouterConfig
from router.router import Router
from serving.api.keyring import KeyEntry, Keyring, key_digest, write_keys
from serving.api.rate_limit import KeyLimits
from serving.api.settings import ServedModel
from serving.errors import WorkerLost
from serving.loader.loading import LoadedModel
from serving.messages import Delta, Request, Role
from serving.text.tokenizer import load_tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling
from tests.flow.conftest import ClusterMaker
from tests.flow.offloading import SMALL, long_prompt
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until
from tests.flow.test_pool import MIXED, SPLIT, cluster
from tests.kvcache.pool.nodes import Cluster as Pool

PEPPER = "pepper of the tests of tenants"
SECRET = "5ec2e7"
PROMPT = prompts(1, shortest=150, longest=150, seed=91)[0]
REUSED = (len(PROMPT) - 1) // 16 * 16
TENANTS = {"aaaa": "one", "aaab": "one", "bbbb": "two", "gggg": "three", "hhhh": "four"}


def entries(**limits: int) -> dict[str, KeyEntry]:
    """Two keys of one tenant, one of another, and two tenants that share."""
    return {
        name: KeyEntry(
            id=name,
            tenant=tenant,
            digest=key_digest(PEPPER.encode(), name, SECRET),
            limits=KeyLimits(**limits),
            share_prefixes="team" if name in ("gggg", "hhhh") else "",
        )
        for name, tenant in TENANTS.items()
    }


def shown(key_id: str) -> dict[str, str]:
    return {"authorization": f"Bearer mr-{key_id}-{SECRET}"}


def app_over(router: Router, path: Path, begun: asyncio.Event | None = None, **limits: int) -> FastAPI:
    """The API over real workers, with a clock that stands still: no limit fills up meanwhile.

    `begun` is set once a request has its third token.
    """

    async def generate(request: Request) -> AsyncIterator[Delta]:
        async with aclosing(cast("AsyncGenerator[Delta]", router.generate(request))) as deltas:
            async for delta in deltas:
                if begun is not None and delta.index >= 2:
                    begun.set()
                yield delta

    served = ServedModel(names=("tiny",), max_model_len=2048, vocab_size=384, created=0)
    over = ScriptedGenerate(lambda request: [])
    over.generate = generate  # type: ignore[method-assign]
    keyring = Keyring(PEPPER.encode(), entries(**limits))
    return app_of(over, load_tokenizer(path), served=served, keyring=keyring, clock=lambda: 0.0)


async def ask(client: httpx.AsyncClient, key_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body, headers=shown(key_id), timeout=60)


async def cached(client: httpx.AsyncClient, key_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> int:
    answer = await ask(client, key_id, prompt, **fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("where", ["embedded", "split-local"])
async def test_another_tenants_prefix_is_a_miss_in_every_workers_cache(
    make_cluster: ClusterMaker, tiny_path: Path, where: str
) -> None:
    follows = RouterConfig(policy="prefix_aware", patience=20.0)  # a request goes where its prefix is, however busy
    async with (
        make_cluster(where, router=follows) as workers,
        calling(app_over(workers.router, tiny_path)) as client,
    ):
        await cached(client, "aaaa")
        assert await cached(client, "aaaa") == REUSED
        assert await cached(client, "aaab") == REUSED, "another key of that tenant"
        assert [await cached(client, "bbbb"), await cached(client, "gggg")] == [0, 0]
        assert await cached(client, "aaaa", cache_salt="a user") == 0, "a tenant may keep its users apart"
        await cached(client, "gggg")
        assert await cached(client, "hhhh") == REUSED, "tenants of a group share"


@pytest.mark.thorough
@pytest.mark.parametrize(("roles", "host"), [(MIXED, False), (SPLIT, False), (MIXED, True)])
async def test_another_tenants_prefix_is_a_miss_in_the_pool_and_on_the_host(
    tiny_model: LoadedModel, roles: tuple[Role, ...], host: bool
) -> None:
    """New workers each time: what they find they have from the pool."""
    prompt, engine = (long_prompt(1500), SMALL) if host else (PROMPT, {})
    async with Pool("local", 1) as pool:
        for number, key_id in enumerate(("aaaa", "bbbb", "aaab")):
            async with (
                cluster(tiny_model, pool, roles, engine) as workers,
                calling(app_over(workers.router, tiny_model.path)) as client,
            ):
                found = await cached(client, key_id, prompt)
                assert (found > len(prompt) // 2) is (number == 2), (key_id, found)


async def test_limits_hold_to_the_token_under_200_requests_at_once(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    async with make_cluster("embedded") as workers:
        app = app_over(workers.router, tiny_path, requests=30, concurrent=12)
        async with calling(app) as client:
            answers = await asyncio.gather(*(ask(client, "aaaa", PROMPT[:20], cache_salt=f"{n}") for n in range(200)))
    assert Counter(answer.status_code for answer in answers) == {200: 12, 429: 188}


async def test_tokens_are_settled_to_the_last_whoever_leaves_and_though_a_worker_is_lost(
    make_cluster: ClusterMaker, tiny_path: Path
) -> None:
    limit, prompt, most = 1_000_000, PROMPT[:20], 30
    begun = asyncio.Event()
    async with make_cluster("embedded-two") as workers:
        app = app_over(workers.router, tiny_path, begun, tokens=limit)
        async with calling(app) as client:
            salts = [{"cache_salt": f"{number}", "max_tokens": most} for number in range(60)]
            staying = [asyncio.create_task(ask(client, "aaaa", prompt, **salt)) for salt in salts[:40]]
            leaving = [asyncio.create_task(ask(client, "aaaa", prompt, **salt)) for salt in salts[40:]]
            await begun.wait()
            fleet = workers.router.fleet
            holder = next(worker for worker in fleet.registry.candidates() if worker.leases)
            fleet.suspect(holder.status.instance, WorkerLost("for the test"))
            for one in leaving:
                one.cancel()
            answers = await asyncio.gather(*staying)
            gone = await asyncio.gather(*leaving, return_exceptions=True)
            await workers.idle()
            last = await ask(client, "aaaa", prompt, max_tokens=1)
    assert workers.seen.replacements, "a worker was meant to be lost"
    assert {answer.status_code for answer in answers} == {200}
    left = int(last.headers["x-ratelimit-remaining-tokens"]) + len(prompt) + 1
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
    assert used == 40 * (len(prompt) + most)
    count = sum(isinstance(one, asyncio.CancelledError) for one in gone)
    assert count and count * len(prompt) <= limit - left - used - (20 - count) * (len(prompt) + most)
    assert limit - left - used < 20 * (len(prompt) + most)


def used_nowhere(server: MillraceServer, *secrets: str) -> bool:
    """True if no log, metric, or command line of the server and its children has any of them."""
    commands = [path.read_bytes() for path in commands_below(server.process.pid)]
    found = [server.log().encode(), server.get("/metrics")[1], *commands]
    return not any(secret.encode() in text for secret in secrets for text in found)


def commands_below(pid: int) -> list[Path]:
    return [Path(f"/proc/{one}/cmdline") for one in (pid, *descendants(pid)) if Path(f"/proc/{one}/cmdline").exists()]


@pytest.mark.slow
def test_over_processes_in_every_tier_and_after_a_kill(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_bytes(write_keys(entries(concurrent=50)))
    flags = [str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32", "--api-keys-file", str(file)]
    flags += ["--mixed", "2", "--kvcache", "1", "--kvcache-fetch", "always", "--routing-policy", "prefix_aware"]
    environ = {"MILLRACE_KEY_PEPPER": PEPPER}
    with (
        MillraceServer(*flags, workers=("mixed-0", "mixed-1"), environ=environ) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def reused(key_id: str) -> int:
            body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body, headers=shown(key_id))
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        def is_served() -> bool:
            """A prompt that nobody keeps is answered."""
            short = {"prompt": [1, 2, 3], "max_tokens": 1}
            return client.post("/v1/completions", json=short, headers=shown("gggg")).status_code == 200

        assert [reused("aaaa"), reused("bbbb")] == [0, 0]
        assert reused("aaab") == reused("bbbb") == REUSED
        wait_until(lambda: server.metric("pool_stored_total") >= 2 * REUSED // 16, 30, "both are in the pool")
        for worker in ("mixed-0", "mixed-1"):
            server.signal_worker(worker, signal.SIGKILL)
        wait_until(lambda: not server.metric("kvcache_usage_perc"), 60, "new workers have nothing")
        server.wait_ready()
        wait_until(is_served, 60, "others have come: two that die over a request end it")
        assert reused("gggg") == 0, "nor is it another's in the pool"
        assert reused("aaaa") == REUSED
        assert used_nowhere(server, SECRET, PEPPER, *(entry.digest.hex() for entry in entries().values()))
        file.write_bytes(write_keys({name: one for name, one in entries().items() if name != "aaaa"}))
        wait_until(lambda: client.get("/v1/models", headers=shown("aaaa")).status_code == 401, 30, "it is revoked")
        assert client.get("/v1/models", headers=shown("aaab")).status_code == 200
