"""POST /v1/embeddings before a scripted router: inputs, answers, bounds, errors, hang-ups; and /tokenizer_info."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from serving.api.embedding_plan import MOST_INPUTS, MOST_TOKENS
from serving.api.embeddings import AT_ONCE
from serving.api.settings import EmbeddingForm, ServedModel
from serving.errors import Overloaded, WorkerLost
from serving.messages import Delta, FinishReason, Pooling, Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import (
    EMBEDDING_SIZE,
    KEY,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    CountingObserver,
    ScriptedGenerate,
    app_of,
    calling,
    embedding_of,
    listening,
)

PATH = "/v1/embeddings"


def script() -> ScriptedGenerate:
    return ScriptedGenerate(lambda request: ())


def served(context: int = MAX_MODEL_LEN, **form: Any) -> ServedModel:
    form = {"size": EMBEDDING_SIZE, **form}
    return ServedModel(
        names=(MODEL,), max_model_len=context, vocab_size=VOCAB_SIZE, created=1, embedding=EmbeddingForm(**form)
    )


def expected(prompt: list[int], dimensions: int | None = None, *, normalize: bool = True) -> NDArray[np.float64]:
    values = np.frombuffer(embedding_of(prompt), "<f4").astype(np.float64)[:dimensions]
    return values / np.linalg.norm(values) if normalize else values


def close(found: Any, wanted: NDArray[np.float64]) -> bool:
    return len(found) == len(wanted) and bool(np.abs(np.array(found) - wanted).max() < 1e-6)


async def test_the_openai_package_takes_both_forms(tokenizer: Tokenizer) -> None:
    texts = ["the mill", "a wheel"]
    async with (
        listening(app_of(made := script(), tokenizer, api_key=KEY)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client,
    ):
        packed = await client.embeddings.create(model=MODEL, input=texts)
        plain = await client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
        one = await client.embeddings.create(model=MODEL, input=texts[0])
        ids = await client.embeddings.create(model=MODEL, input=tokenizer.encode(texts[0]))
        lists = await client.embeddings.create(model=MODEL, input=[tokenizer.encode(text) for text in texts])
    wanted = [expected(tokenizer.encode(text)) for text in texts]
    for answer in (packed, plain, lists):
        assert [item.index for item in answer.data] == [0, 1]
        assert all(close(item.embedding, each) for item, each in zip(answer.data, wanted, strict=True))
    assert close(one.data[0].embedding, wanted[0]) and close(ids.data[0].embedding, wanted[0])
    assert packed.model == MODEL and packed.object == "list" and packed.data[0].object == "embedding"
    count = sum(len(tokenizer.encode(text)) for text in texts)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == count
    assert {request.pooling for request in made.started} == {Pooling.LAST}
    assert len(made.closed) == len(made.started) == len({request.request_id for request in made.started}) == 8


async def test_base64_is_little_endian_float32(tokenizer: Tokenizer) -> None:
    async with calling(app_of(script(), tokenizer)) as client:
        answer = await client.post(PATH, json={"input": [7, 8], "encoding_format": "base64"})
    values = np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), "<f4")
    assert close(values, expected([7, 8]))
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("form", "fields", "dimensions", "normalize"),
    [
        ({}, {}, None, True),
        ({}, {"normalize": False}, None, False),
        ({"normalize": False}, {}, None, False),
        ({"normalize": False}, {"normalize": True}, None, True),
        ({}, {"dimensions": EMBEDDING_SIZE}, None, True),
        ({"dimensions": ()}, {"dimensions": 3}, 3, True),
        ({"dimensions": (2, 4)}, {"dimensions": 4}, 4, True),
        ({"dimensions": (2, 4), "normalize": False}, {"dimensions": 2}, 2, False),
    ],
)
async def test_vectors_are_cut_and_normalized_as_model_and_client_say(
    tokenizer: Tokenizer, form: dict[str, Any], fields: dict[str, Any], dimensions: int | None, normalize: bool
) -> None:
    async with calling(app_of(script(), tokenizer, served=served(**form))) as client:
        answer = await client.post(PATH, json={"input": [7, 8], **fields})
    found = answer.json()["data"][0]["embedding"]
    assert close(found, expected([7, 8], dimensions, normalize=normalize))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "Field required"),
        ({"input": None}, "input", "must be a string"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": ["a", 1]}, "input[1]", "is not a string"),
        ({"input": [[1], "a"]}, "input[1]", "is not a list of token ids"),
        ({"input": [1, VOCAB_SIZE]}, "input[1]", "is not a token id"),
        ({"input": [[1], [1, 2**64]]}, "input[1][1]", "is not a token id"),
        ({"input": {"a": 1}}, "input", "must be a string"),
        ({"input": [7] * MAX_MODEL_LEN}, "input", "maximum context length is 256"),
        ({"input": ["a"] * (MOST_INPUTS + 1)}, "input", "2049 are more than 2048"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format", ""),
        ({"input": "a", "dimensions": 4}, "dimensions", "does not say that its embeddings can be shortened"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens", "more than the context"),
        ({"input": "a", "service_class": "x"}, "service_class", "none of the service classes"),
        ({"input": "a", "tools": [{}]}, "tools", "not a supported field"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not a supported field"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, words: str
) -> None:
    async with calling(app_of(made := script(), tokenizer)) as client:
        answer = await client.post(PATH, json=fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert made.started == []


async def test_all_inputs_together_are_bounded(tokenizer: Tokenizer) -> None:
    app = app_of(made := script(), tokenizer, served=served(context=100_000))
    async with calling(app) as client:
        fits = await client.post(PATH, json={"input": [[7] * 75_000] * 4})
        too_many = await client.post(PATH, json={"input": [[7] * 75_000] * 4 + [[7]]})
    assert fits.status_code == 200 and fits.json()["usage"]["prompt_tokens"] == MOST_TOKENS == 300_000
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "input"
    assert len(made.started) == 4


async def test_a_dimension_that_the_model_was_not_trained_for(tokenizer: Tokenizer) -> None:
    async with calling(app_of(script(), tokenizer, served=served(dimensions=(2, 4)))) as client:
        answer = await client.post(PATH, json={"input": "a", "dimensions": 3})
    assert answer.status_code == 400 and "3 is none of this model's: 2, 4" in answer.text


async def test_a_model_without_embeddings_says_why(tokenizer: Tokenizer) -> None:
    async with calling(app_of(script(), tokenizer, served=served(refusal="it goes through 'Dense'"))) as client:
        answer = await client.post(PATH, json={"input": "a"})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "it goes through 'Dense'"


@pytest.mark.parametrize(("wanted", "kept"), [(2, 2), (-1, MAX_MODEL_LEN - 1), (MAX_MODEL_LEN, MAX_MODEL_LEN - 1)])
async def test_the_last_tokens_are_kept_of_an_input_that_is_too_long(
    tokenizer: Tokenizer, wanted: int, kept: int
) -> None:
    ids = [3 + i % 300 for i in range(1000)]
    text = "the mill " * 300
    async with calling(app_of(made := script(), tokenizer)) as client:
        for given in (ids, [ids], text, [text]):
            answer = await client.post(PATH, json={"input": given, "truncate_prompt_tokens": wanted})
            assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == kept
    words = tokenizer.encode(text)
    assert [list(request.prompt) for request in made.started] == [ids[-kept:]] * 2 + [words[-kept:]] * 2


async def test_promises_and_ignored_fields_are_those_of_every_request(tokenizer: Tokenizer) -> None:
    fields = {"priority": 3, "cache_salt": "s", "user": "u", "service_class": "batch", "temperature": 1, "store": True}
    observer = CountingObserver()
    async with calling(app_of(made := script(), tokenizer, observer=observer)) as client:
        answer = await client.post(PATH, json={"input": "a", **fields}, headers={"x-request-timeout": "60"})
    async with calling(app_of(script(), tokenizer, strict_fields=True)) as client:
        strict = await client.post(PATH, json={"input": "a", **fields})
    (request,) = made.started
    assert request.tenant == "s" and request.session == "u" and request.service_class == "batch"
    assert request.priority > 3 and request.deadline is not None
    assert answer.headers["x-millrace-ignored"] == "temperature, store"
    assert observer.ignored == ["other", "store"]
    assert observer.finished == [(FinishReason.STOP, 0)] and observer.started == [1]
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "temperature"


async def test_an_input_knows_whether_it_is_the_only_one(tokenizer: Tokenizer) -> None:
    async with calling(app_of(made := script(), tokenizer)) as client:
        for input in ("a", ["a", "b"]):
            assert (await client.post(PATH, json={"input": input})).status_code == 200
    assert [request.alone for request in made.started] == [True, False, False]


async def test_many_inputs_are_asked_for_some_at_a_time_and_answered_in_order(tokenizer: Tokenizer) -> None:
    running, most = 0, 0

    async def before(request: Request, number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(len(request.prompt) % 7):
            await asyncio.sleep(0)
        running -= 1

    inputs = [[3 + i % 300] * (1 + i % 50) for i in range(MOST_INPUTS)]
    made = ScriptedGenerate(lambda request: (), before=before)
    async with calling(app_of(made, tokenizer), timeout=60) as client:
        answer = await client.post(PATH, json={"input": inputs})
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(MOST_INPUTS))
    assert all(close(item["embedding"], expected(ids)) for item, ids in zip(data, inputs, strict=True))
    assert 8 < most <= AT_ONCE


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 429), (WorkerLost("gone"), 503)])
async def test_the_first_failure_ends_the_others(tokenizer: Tokenizer, error: Exception, status: int) -> None:
    async def before(request: Request, number: int) -> None:
        if request.prompt == (5,):
            raise error
        await asyncio.Event().wait()

    observer = CountingObserver()
    made = ScriptedGenerate(lambda request: (), before=before)
    async with calling(app_of(made, tokenizer, observer=observer)) as client:
        answer = await client.post(PATH, json={"input": [[7], [5], [8]]})
    assert answer.status_code == status and observer.refused == [status]
    assert len(made.closed) == len(made.started) == len(observer.finished) == 3


@pytest.mark.parametrize("embedding", [b"", b"abc", bytes(4), np.full(EMBEDDING_SIZE, np.nan, "<f4").tobytes()])
async def test_what_is_no_embedding_is_a_500_and_not_an_answer(tokenizer: Tokenizer, embedding: bytes) -> None:
    class Wrong(ScriptedGenerate):
        async def generate(self, request: Request) -> Any:
            yield Delta(index=0, tokens=(), finish=FinishReason.STOP, embedding=embedding)

    async with calling(app_of(Wrong(lambda request: ()), tokenizer)) as client:
        answer = await client.post(PATH, json={"input": "a"})
    assert answer.status_code == 500


async def test_a_client_that_leaves_ends_all_its_inputs(tokenizer: Tokenizer) -> None:
    arrived = asyncio.Event()

    async def before(request: Request, number: int) -> None:
        arrived.set()
        await asyncio.Event().wait()

    made, observer = ScriptedGenerate(lambda request: (), before=before), CountingObserver()
    async with listening(app_of(made, tokenizer, observer=observer)) as port:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.create_task(
                client.post(f"http://127.0.0.1:{port}{PATH}", json={"input": [[7 + i] for i in range(200)]})
            )
            await arrived.wait()
            asking.cancel()
        await asyncio.wait_for(made.all_closed.wait(), 60)
        while len(observer.finished) < len(made.started):
            await asyncio.sleep(0.01)
    assert len(made.started) == AT_ONCE and {finish for finish, _ in observer.finished} == {FinishReason.ABORT}


async def test_tokens_count_towards_the_rate_limit(tokenizer: Tokenizer) -> None:
    async with calling(app_of(script(), tokenizer, rate_limit_tokens=10)) as client:
        first = await client.post(PATH, json={"input": [[7] * 3] * 3})
        second = await client.post(PATH, json={"input": [7] * 3})
    assert first.status_code == 200 and first.headers["x-ratelimit-remaining-tokens"] == "1"
    assert second.status_code == 429


async def test_tokenizer_info_is_what_a_remote_tokenizer_reads(tokenizer: Tokenizer) -> None:
    async with calling(app_of(script(), tokenizer, api_key=KEY)) as client:
        refused = await client.get("/tokenizer_info")
        client.headers["authorization"] = f"Bearer {KEY}"
        told = (await client.get("/tokenizer_info")).json()
        ends = {}
        for role in ("bos_token", "eos_token", "pad_token"):
            body = {"prompt": told[role], "add_special_tokens": False}
            ends[role] = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert refused.status_code == 401
    assert told["chat_template"] == tokenizer.chat_template and told["model_max_length"] == MAX_MODEL_LEN
    assert isinstance(told["tokenizer_class"], str) and KEY not in str(told)
    assert ends == {"bos_token": [1], "eos_token": [2], "pad_token": [2]}
