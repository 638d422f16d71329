"""With --metrics-prefix vllm the router's /metrics has every series that vLLM's boards and llm-d's picker ask for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from deploy.frontend import Frontend
from serving.api.settings import ServedModel
from serving.config import HttpConfig
from tests.fakes.generate import tiny_tokenizer
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.vllm_boards import BOARDS, PICKER

BODY = {"prompt": [5, 6, 7, 8] * 10, "max_tokens": 12, "ignore_eos": True}


@asynccontextmanager
async def front_over(cluster: Cluster, folder: Path, prefix: str = "vllm") -> AsyncIterator[httpx.AsyncClient]:
    """The whole front of a router, as `millrace serve` has it, over this cluster."""
    served = ServedModel(names=("tiny", "small"), max_model_len=256, vocab_size=384, created=1)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = HttpConfig(metrics_prefix=prefix)
        front = Frontend(cluster.cluster.placer, config, served, tiny_tokenizer(folder), listening)
        await front.server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.server.port}", timeout=60) as client:
                yield client
        finally:
            await front.server.stop()


async def page_after_requests(make_cluster: ClusterMaker, folder: Path) -> list[Sample]:
    async with make_cluster("split-local", num_speculative_tokens=4) as cluster, front_over(cluster, folder) as client:

        async def ask(**fields: Any) -> httpx.Response:
            return await client.post("/v1/completions", json={**BODY, **fields})

        assert (await ask(model="small")).json()["model"] == "small"
        answers = await asyncio.gather(ask(), ask(n=2, seed=3, temperature=1.0), ask(stream=True), ask(model="large"))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 404]
        cluster.cluster.beat()
        text = (await client.get("/metrics")).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def test_every_series_of_the_boards_is_there(make_cluster: ClusterMaker, tmp_path: Path) -> None:
    page = await page_after_requests(make_cluster, tmp_path)
    labels: dict[str, frozenset[str]] = {}
    for sample in page:
        labels.setdefault(sample.name, frozenset(sample.labels))
    for board, series in {**BOARDS, "the picker": PICKER}.items():
        for name, asked in series.items():
            assert name in labels, f"{board} asks for {name}"
            assert asked <= labels[name], f"{board} asks for {name} by {sorted(asked)}"
            assert "model_name" in labels[name] or not name.startswith("vllm:"), name
    for sample in page:
        asked_for = any(sample.name in series for series in BOARDS.values())
        assert not (asked_for and "engine" in sample.labels), f"{sample}: boards would add it to the whole"
        assert not sample.name.startswith("millrace:")


async def test_the_numbers_are_those_of_the_requests(make_cluster: ClusterMaker, tmp_path: Path) -> None:
    page = await page_after_requests(make_cluster, tmp_path)

    def value(name: str, **labels: str) -> float:
        (found,) = [s.value for s in page if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()]
        return found

    assert {s.labels["model_name"] for s in page if s.name.startswith("vllm:num_requests")} == {"tiny"}
    assert value("request_success_total", finished_reason="length") == 5
    assert value("generation_tokens_total") == 60
    assert (value("request_max_num_generation_tokens_sum"), value("request_max_num_generation_tokens_count")) == (48, 4)
    assert value("request_decode_time_seconds_count") == value("e2e_request_latency_seconds_count") == 5
    assert value("request_decode_time_seconds_sum") <= value("e2e_request_latency_seconds_sum")
    assert value("time_per_output_token_seconds_count") == value("inter_token_latency_seconds_count") > 0
    assert value("iteration_tokens_total_bucket", le="+Inf") == value("iteration_tokens_total_count") > 0
    assert value("iteration_tokens_total_sum") >= 60
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert sum(value("prompt_tokens_by_source_total", source=source) for source in sources) == 200
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert 0 <= value("kv_cache_usage_perc") <= 1 and value("engine_sleep_state", sleep_state="awake") == 1
    (cache,) = [s.labels for s in page if s.name == "vllm:cache_config_info"]
    workers = [s for s in page if s.name == "vllm:worker_num_requests_running"]
    assert len(workers) == 4 and int(cache["num_gpu_blocks"]) % 4 == 0 and int(cache["block_size"]) == 16
    answers = {(s.labels["handler"], s.labels["status"]): s.value for s in page if s.name == "http_requests_total"}
    assert answers == {("/v1/completions", "2xx"): 4, ("/v1/completions", "4xx"): 1}
    accepted = value("spec_decode_num_accepted_tokens_total")
    at = [s.value for s in page if s.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert accepted == sum(at) and accepted <= value("spec_decode_num_draft_tokens_total")
