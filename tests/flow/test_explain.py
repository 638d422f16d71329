"""A request's explanation over real workers: the placement it had, what that took, and what was cached for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.fleet import RouterConfig
from router.overview import RouterOverview
from serving.api.app import create_app
from serving.api.settings import ServedModel
from serving.config import HttpConfig
from serving.text.tokenizer import load_tokenizer
from tests.fakes.generate import CountingObserver, calling
from tests.fakes.sequences import make_request
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import prompts
from tests.tiny import write_tokenizer

WORKERS = {
    "embedded": ({"mixed-0"}, {"mixed-0"}),
    "split-local": ({"prefill-0", "prefill-1"}, {"decode-2", "decode-3"}),
}


@pytest.mark.parametrize("placement", list(WORKERS))
async def test_an_explanation_shows_the_placement_and_what_it_took(placement: str, make_cluster: ClusterMaker) -> None:
    (prompt,) = prompts(1, shortest=100, longest=100, seed=3)
    prefills, decodes = WORKERS[placement]
    async with make_cluster(placement, router=RouterConfig(policy="prefix_aware", patience=20.0)) as cluster:
        overview = RouterOverview(cluster.router)
        for name in ("first", "second"):
            await cluster.tokens(make_request(prompt, request_id=name, max_tokens=6))
        for name, cached in (("first", 0), ("second", 96)):
            told = overview.explain(name)
            assert told is not None and told["outcome"] == "completed"
            (attempt,) = told["attempts"]
            assert attempt["prefill"] in prefills and attempt["decode"] in decodes
            at_decode = 0 if placement == "embedded" else attempt["cached_tokens"]["decode"]
            tiers = {"device": cached, "pool": 0, "decode": at_decode}
            assert attempt["cached_tokens"] == {"expected": cached, "actual": cached, **tiers}
            actual = attempt["actual"]
            assert 0 <= actual["prefill"] <= actual["ttft"] <= told["ttft_seconds"]
            assert 0 <= actual["queue"] + actual["prefill"] <= told["ttft_seconds"], "the queue begins with the lease"
            assert told["ttft_seconds"] + 5 * told["tpot_seconds"] <= told["total_seconds"]
            assert (actual["transfer"] is None) is (placement == "embedded")


def serve(cluster: Cluster, folder: Path) -> object:
    """The HTTP API over the cluster, wired as the frontend wires it."""
    write_tokenizer(folder, vocab_size=384)
    return create_app(
        cluster.router.generate,
        tokenizer=load_tokenizer(folder),
        served=ServedModel(names=("tiny",), max_model_len=256, vocab_size=384, created=1),
        config=HttpConfig(api_key="one,two"),
        observer=CountingObserver(),
        health=lambda: (True, ""),
        audit=no_audit,
        metrics_text=lambda: b"",
        clock=cluster.router.clock,
        placements=RouterOverview(cluster.router),
    )


async def no_audit() -> dict[str, object]:
    return {}


async def test_a_client_finds_out_through_the_api(make_cluster: ClusterMaker, tmp_path: Path) -> None:
    body = {"prompt": list(range(5, 45)), "max_tokens": 8, "ignore_eos": True}
    async with make_cluster("embedded") as cluster:
        app = serve(cluster, tmp_path)
        async with calling(app, headers={"authorization": "Bearer one"}) as client:  # type: ignore[arg-type]
            answers = await asyncio.gather(
                client.post("/v1/completions", json={**body, "service_class": "interactive"}),
                client.post("/v1/completions", json={**body, "stream": True}, headers={"x-request-id": "mine"}),
            )
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            for answer in answers:
                placed = "prefill=mixed-0;decode=mixed-0;reason=least_loaded"
                assert answer.headers["x-millrace-placement"] == placed
            found = (await client.get(f"/v1/requests/{answers[0].json()['id']}/explain")).json()
            (told,) = found["sequences"]
            assert (told["service_class"], told["priority"]) == ("interactive", -100)
            assert told["objectives"] == {"ttft_ms": 1000.0, "tpot_ms": 100.0}
            assert (await client.get("/v1/requests/mine/explain")).status_code == 200
            other = {"authorization": "Bearer two"}
            assert (await client.get("/v1/requests/mine/explain", headers=other)).status_code == 404
            workers = (await client.get("/v1/workers")).json()
            assert [worker["name"] for worker in workers["workers"]] == ["mixed-0"]
            assert workers["classes"]["standard"]["completed"] == 1 and workers["tokens"] == 16
