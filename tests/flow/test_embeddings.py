"""Embeddings equal to `transformers`' pooled hidden states, however prompts are placed, cut and batched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from deploy.embedding_form import embedding_form
from router.overview import RouterOverview
from serving.api.app import create_app
from serving.api.settings import EmbeddingForm, ServedModel
from serving.config import HttpConfig
from serving.loader.loading import load
from serving.messages import Delta, FinishReason, Pooling, Request, SamplingParams
from serving.text.tokenizer import load_tokenizer
from tests.deploy.test_embedding_form import write_modules
from tests.fakes.generate import CountingObserver, listening
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import greedy_tiny, hidden_states, prompts
from tests.serving.model.oracle import LONGROPE_ORIGINAL, VOCAB, build, configs, save

CLOSE = 1e-4
PROMPTS = [*prompts(7, seed=3), [5]]


def wanted(prompt: Sequence[int], pooling: Pooling, name: str = "e") -> Request:
    return Request(
        request_id=f"{name}-{pooling}", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=1), pooling=pooling
    )


def pooled(path: Path, prompt: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    hidden = hidden_states(path, prompt)
    rows = {Pooling.LAST: hidden[-1], Pooling.MEAN: hidden.mean(0), Pooling.FIRST: hidden[0]}
    return rows[pooling].numpy()


async def embedded(cluster: Cluster, request: Request) -> Delta:
    (delta,) = [delta async for delta in cluster.router.generate(request)]
    assert delta.finish is FinishReason.STOP and delta.tokens == ()
    return delta


async def all_embedded(cluster: Cluster, pooling: Pooling, some: list[list[int]] = PROMPTS) -> list[bytes]:
    requests = [wanted(prompt, pooling, f"e{i}") for i, prompt in enumerate(some)]
    return [delta.embedding for delta in await asyncio.gather(*(embedded(cluster, each) for each in requests))]


def values(embedding: bytes) -> NDArray[np.float32]:
    return np.frombuffer(embedding, "<f4")


@pytest.mark.parametrize("pooling", Pooling)
async def test_embeddings_equal_transformers(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path, pooling: Pooling
) -> None:
    async with make_cluster(placement) as cluster:
        found = await all_embedded(cluster, pooling)
    for prompt, embedding in zip(PROMPTS, found, strict=True):
        assert np.abs(values(embedding) - pooled(tiny_path, prompt, pooling)).max() < CLOSE


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_they_are_the_same_however_prompts_are_cut_and_whatever_runs_beside(
    make_cluster: ClusterMaker, tiny_path: Path, kernels: str
) -> None:
    """To the bit by the compiled kernels. The text beside them is what it is without them."""
    prompt = PROMPTS[0]
    expected = greedy_tiny(tiny_path, prompt, 24)
    found: dict[Pooling, list[list[bytes]]] = {pooling: [] for pooling in Pooling}
    for budget in (9, 2048):
        async with make_cluster("embedded", kernels=kernels, max_num_batched_tokens=budget, max_num_seqs=7) as cluster:
            text = asyncio.create_task(cluster.tokens(greedy_request(prompt, 24)))
            for pooling in Pooling:
                found[pooling].append(await all_embedded(cluster, pooling, PROMPTS[-3:]))
            assert await text == expected
    for pooling, runs in found.items():
        for run in runs:
            if kernels == "auto":
                assert run == runs[0], pooling
            assert all(
                np.abs(values(one) - values(other)).max() < CLOSE for one, other in zip(run, runs[0], strict=True)
            )


def greedy_request(prompt: Sequence[int], tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id="text", prompt=tuple(prompt), sampling=sampling)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "phi3_longrope", "opt", "gpt2"])
async def test_families(make_cluster: ClusterMaker, tmp_path: Path, family: str) -> None:
    reference = build(configs()[family])
    model = load(save(reference, tmp_path), "float32")
    asked = [[(5 * i + n) % VOCAB for i in range(n)] for n in (9, LONGROPE_ORIGINAL, LONGROPE_ORIGINAL + 1, 41)]
    async with make_cluster("embedded", model=model, max_num_batched_tokens=16) as cluster:
        found = await all_embedded(cluster, Pooling.MEAN, asked)
    for prompt, embedding in zip(asked, found, strict=True):
        with torch.inference_mode():
            states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0]
        assert np.abs(values(embedding) - states.mean(0).numpy()).max() < CLOSE


@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_cached_blocks_are_used_where_no_hidden_state_of_theirs_is_wanted(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path
) -> None:
    prompt = prompts(1, shortest=100, longest=100, seed=5)[0]
    cached: dict[Pooling, list[int]] = {}
    async with make_cluster(placement) as cluster:
        for pooling in Pooling:
            deltas = [await embedded(cluster, wanted(prompt, pooling, f"e{i}")) for i in range(4)]
            cached[pooling] = [delta.cached_tokens for delta in deltas]
            for delta in deltas:
                assert np.abs(values(delta.embedding) - pooled(tiny_path, prompt, pooling)).max() < CLOSE
        text = await cluster.tokens(greedy_request(prompt, 8))
    assert cached[Pooling.LAST][0] == 0 and cached[Pooling.LAST][-1] == 96
    assert cached[Pooling.MEAN] == cached[Pooling.FIRST] == [0] * 4
    assert text == greedy_tiny(tiny_path, prompt, 8), "what an embedding has left in the cache is as good as any"


@pytest.mark.parametrize("pooling", Pooling)
async def test_a_prompt_with_kv_in_host_memory(make_cluster: ClusterMaker, tiny_path: Path, pooling: Pooling) -> None:
    prompt = prompts(1, shortest=700, longest=700, seed=6)[0]
    async with make_cluster("embedded", num_kv_blocks=24, host_kv_memory=64 << 20) as cluster:
        delta = await embedded(cluster, wanted(prompt, pooling))
    assert np.abs(values(delta.embedding) - pooled(tiny_path, prompt, pooling)).max() < CLOSE


async def test_hidden_states_that_are_no_numbers_are_one_requests_error(make_cluster: ClusterMaker) -> None:
    async with make_cluster("embedded") as cluster:
        (worker,) = cluster.cluster.workers
        runner = worker.engine.runner
        hidden = runner.forward.hidden
        runner.forward.hidden = lambda batch, told: hidden(batch, told) * torch.nan
        with pytest.raises(Exception, match="hidden states that are not numbers"):
            await embedded(cluster, wanted([5, 6, 7], Pooling.LAST))
        runner.forward.hidden = hidden
        await embedded(cluster, wanted([5, 6, 7], Pooling.LAST))


@asynccontextmanager
async def at_the_door(cluster: Cluster, path: Path, form: EmbeddingForm) -> AsyncIterator[int]:
    """The HTTP API over the cluster, on a socket; its port."""
    served = ServedModel(names=("tiny",), max_model_len=2048, vocab_size=384, created=1, embedding=form)
    app = create_app(
        cluster.router.generate,
        tokenizer=load_tokenizer(path),
        served=served,
        config=HttpConfig(),
        observer=CountingObserver(),
        health=lambda: (True, ""),
        audit=no_audit,
        metrics_text=lambda: b"",
        clock=cluster.router.clock,
        placements=RouterOverview(cluster.router),
    )
    async with listening(app) as port:
        yield port


async def no_audit() -> dict[str, object]:
    return {}


@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens", "cls_token", None])
async def test_the_openai_package_gets_what_the_model_says(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path, tmp_path: Path, pooling: str | None
) -> None:
    if pooling is not None:
        write_modules(tmp_path, pooling, normalize=pooling == "lasttoken")
    form = embedding_form(tmp_path, 64)
    texts = ["The mill stands where the river narrows.", "Paris " * 100, "a"]
    async with (
        make_cluster(placement) as cluster,
        at_the_door(cluster, tiny_path, form) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as client,
    ):
        packed = await client.embeddings.create(model="tiny", input=texts)
        raw = await client.embeddings.with_raw_response.create(model="tiny", input=texts, encoding_format="float")
    tokenizer = load_tokenizer(tiny_path)
    for answer in (packed, raw.parse()):
        for item, text in zip(answer.data, texts, strict=True):
            wanted = pooled(tiny_path, tokenizer.encode(text), form.pooling)
            if form.normalize:
                wanted = wanted / np.linalg.norm(wanted)
            assert np.abs(np.array(item.embedding) - wanted).max() < CLOSE
    assert "prefill=" in raw.headers["x-millrace-placement"]


@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_a_client_that_leaves_leaves_nothing(make_cluster: ClusterMaker, placement: str, tiny_path: Path) -> None:
    """The cluster is idle at the end."""
    inputs = prompts(80, shortest=500, longest=900)
    async with make_cluster(placement) as cluster, at_the_door(cluster, tiny_path, EmbeddingForm(size=64)) as port:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"http://127.0.0.1:{port}/v1/embeddings"
            asking = asyncio.create_task(client.post(url, json={"input": inputs}))
            while not any(worker.status().waiting for worker in cluster.cluster.workers):
                await asyncio.sleep(0.005)
            asking.cancel()
        await cluster.idle()
        left = {type(error) for _, _, error in cluster.seen.endings if error is not None}
        assert left <= {asyncio.CancelledError, GeneratorExit}
        assert len(cluster.seen.endings) < len(inputs)


async def test_a_deadline_ends_them(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    async with make_cluster("embedded") as cluster, at_the_door(cluster, tiny_path, EmbeddingForm(size=64)) as port:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"http://127.0.0.1:{port}/v1/embeddings",
                json={"input": prompts(80, shortest=900, longest=900)},
                headers={"x-request-timeout": "0.05"},
            )
        assert answer.status_code == 504
