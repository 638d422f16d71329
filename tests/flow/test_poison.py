"""Requests made to break things, against real workers: one client's error each, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from serving.api.messages_body import CountTokensBody, MessagesBody
from serving.api.response_schema import ResponsesBody
from serving.api.schema import ChatCompletionBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from serving.api.settings import EmbeddingForm
from serving.engine.plan import Work
from serving.engine.run import LayerDone, RunResult
from serving.engine.runner import ModelRunner
from serving.messages import Request, SamplingParams
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_embeddings import at_the_door

TURN = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletionBody, {"messages": TURN, "max_tokens": 2}),
    ("/v1/completions", CompletionBody, {"prompt": [5, 6], "max_tokens": 2}),
    ("/v1/responses", ResponsesBody, {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", MessagesBody, {"messages": TURN, "max_tokens": 2}),
    ("/v1/messages/count_tokens", CountTokensBody, {"messages": TURN}),
    ("/v1/embeddings", EmbeddingBody, {"input": "hi"}),
    ("/tokenize", TokenizeBody, {"prompt": "hi"}),
    ("/detokenize", DetokenizeBody, {"tokens": [5]}),
]
ENDS = (2**21, 2**22, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40)
ENDS = (*ENDS, -1, -(2**31), -(2**63), -(2**64))
POISON = [7, 7, 5]
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


def takes_integers(annotation: Any) -> bool:
    return annotation is int or any(map(takes_integers, get_args(annotation)))


def poisoned() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field that takes integers, alone or in lists, with the ends of all integer types."""
    for path, kind, body in BODIES:
        for name, field in kind.model_fields.items():
            if takes_integers(field.annotation):
                shown = field.alias or name
                yield from ((path, {**body, shown: end}) for end in ENDS)
                yield from ((path, {**body, shown: [end]}) for end in ENDS[:: len(ENDS) // 4])
        yield from ((path, {**body, "logit_bias": {str(end): 1}}) for end in ENDS)


async def steadily(cluster: Cluster, path: Path, done: asyncio.Event) -> int:
    """One honest client after the other gets its text until `done`; how many there were."""
    count = 0
    while not done.is_set() or count < 2:
        (prompt,) = prompts(1, seed=count)
        request = Request(request_id=f"honest-{count}", prompt=tuple(prompt), sampling=GREEDY)
        assert await cluster.tokens(request) == greedy_tiny(path, prompt, 30)
        count += 1
    return count


def nobody_is_suspect(cluster: Cluster, workers: int) -> None:
    assert cluster.seen.replacements == []
    assert len(cluster.router.fleet.candidates()) == workers


@pytest.mark.thorough
async def test_integers_of_every_width_in_every_field(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    room = asyncio.Semaphore(16)

    async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        async with room:
            answer = await client.post(path, json=body)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
        return answer.status_code, path, body

    async with (
        make_cluster("all-grpc", num_kv_blocks=4096) as cluster,
        at_the_door(cluster, tiny_path, EmbeddingForm()) as port,
    ):
        done = asyncio.Event()
        honest = asyncio.create_task(steadily(cluster, tiny_path, done))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answers = await asyncio.gather(*(send(client, path, body) for path, body in poisoned()))
        done.set()
        assert await honest > 1
        nobody_is_suspect(cluster, 3)
    assert len(answers) > 500
    assert [answer for answer in answers if answer[0] not in (200, 400)] == []
    assert {status for status, _, _ in answers} == {200, 400}


@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_a_body_over_which_the_engine_makes_a_mistake(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, broken = ModelRunner.run, list[int]()

    def breaks(runner: ModelRunner, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        result = run(runner, work, layer_done)
        if any(item.seq.request.prompt == tuple(POISON) for item in work):
            broken.append(len(work))
            raise IndexError("a mistake over one request")
        return result

    monkeypatch.setattr(ModelRunner, "run", breaks)
    async with make_cluster(placement) as cluster, at_the_door(cluster, tiny_path, EmbeddingForm()) as port:
        done, workers = asyncio.Event(), len(cluster.router.fleet.candidates())
        honest = asyncio.create_task(steadily(cluster, tiny_path, done))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            poison = {"prompt": POISON, "max_tokens": 9}
            beside = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0}
            answers = [asyncio.create_task(client.post("/v1/completions", json=beside)) for _ in range(4)]
            for stream in (False, True):
                failed = await client.post("/v1/completions", json={**poison, "stream": stream})
                assert failed.status_code == 500 and "failed on this request" in failed.text
            texts = await asyncio.gather(*answers)
            done.set()
            assert await honest > 1
            bodies = [{**poison, "n": n} for n in (1, 2, 2)]  # steps of nothing else
            for failed in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
                assert failed.status_code == 500 and "failed on this request" in failed.text
        nobody_is_suspect(cluster, workers)
    assert broken
    assert [answer.status_code for answer in texts] == [200] * 4
    assert len({answer.json()["choices"][0]["text"] for answer in texts}) == 1
