"""The whole server as users meet it: the openai client, and the table of malformed requests, against real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from openai import AuthenticationError, BadRequestError, OpenAI

from tests.flow.reference import hidden_states, prompts
from tests.flow.server import MillraceServer
from tests.serving.api.malformed import cases, key_cases, slow_drip

pytestmark = pytest.mark.slow

KEY = "sk-of-the-tests"


@pytest.fixture(scope="module", params=["embedded", "split"])
def server(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[MillraceServer]:
    split = request.param == "split"
    arguments = ("--prefill", "1", "--decode", "1") if split else ()
    workers = ("prefill-0", "decode-0") if split else ("mixed-0",)
    flags = (str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32")
    with MillraceServer(*flags, *arguments, workers=workers) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: MillraceServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_streamed_is_the_chat(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": ask("Hello there"), "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"


def test_a_call_that_is_required_is_one_whatever_the_model_says(client: OpenAI) -> None:
    parameters = {"properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "rain", "parameters": parameters}}
    asked = {"model": "tiny", "messages": ask("Rain?"), "tools": [tool], "tool_choice": "required", "seed": 5}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False)  # type: ignore[call-overload]
    parts = list(client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True))  # type: ignore[call-overload]
    (call,) = whole.choices[0].message.tool_calls
    deltas = [delta for part in parts for delta in part.choices[0].delta.tool_calls or ()]
    assert call.function.name == deltas[0].function.name == "rain"
    assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "tool_calls"


def test_logprobs_rank_the_greedy_choice_first(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ask("Hi"), max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob
        assert [top.logprob for top in one.top_logprobs] == sorted(
            (top.logprob for top in one.top_logprobs), reverse=True
        )


def test_three_choices_differ_and_come_back_with_their_seed(client: OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Once upon", "max_tokens": 16, "temperature": 1.0, "n": 3, "seed": 7}
    first = client.completions.create(**asked)  # type: ignore[call-overload]
    again = client.completions.create(**asked)  # type: ignore[call-overload]
    texts = [choice.text for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in sorted(again.choices, key=lambda choice: choice.index)]
    assert first.usage.completion_tokens == 48


def test_a_stop_string_ends_the_text_before_it(client: OpenAI, server: MillraceServer) -> None:
    asked = {"model": "tiny", "prompt": "The mill", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
    stop = whole[10:13]
    answer = client.completions.create(**asked, stop=[stop])  # type: ignore[call-overload]
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 40
    server.wait_idle()


def test_echo_with_logprobs_covers_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[20, 30, 40, 50], max_tokens=4, temperature=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 8
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])


def test_several_prompts_at_once_keep_their_order(client: OpenAI) -> None:
    alone = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in ("One", "Two", "Three")
    ]
    together = client.completions.create(model="tiny", prompt=["One", "Two", "Three"], max_tokens=6, temperature=0)
    assert [choice.text for choice in together.choices] == alone


def test_a_prompt_too_long_says_by_how_much(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(model="tiny", prompt=[5] * 3000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"
    assert "3000" in raised.value.message and "2048" in raised.value.message


async def test_every_malformed_request_gets_its_answer(server: MillraceServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as raw:
        for case in cases(model="tiny", max_model_len=2048, vocab_size=384):
            case.check(await case.send(raw))
        good = await raw.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 2})
    assert good.status_code == 200
    await asyncio.to_thread(server.wait_idle)


def test_embeddings_are_the_models(client: OpenAI, server: MillraceServer, tiny_path: Path) -> None:
    inputs = prompts(5, seed=8)
    for asked in ({}, {"encoding_format": "float"}):  # the package asks for base64 by itself
        answer = client.embeddings.create(model="tiny", input=inputs, **asked)  # type: ignore[call-overload]
        for item, ids in zip(answer.data, inputs, strict=True):
            last = hidden_states(tiny_path, ids)[-1]
            assert (torch.tensor(item.embedding) - last / last.norm()).abs().max() < 1e-4
    assert answer.usage.prompt_tokens == sum(map(len, inputs))
    server.wait_idle()


def test_metrics_have_vllms_names(server: MillraceServer, client: OpenAI) -> None:
    before = server.metric("generation_tokens_total")
    client.completions.create(model="tiny", prompt="Count", max_tokens=5, temperature=0)
    assert server.metric("generation_tokens_total") == before + 5
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("request_success_total", finished_reason="length") > 0
    assert server.metric("leaked_blocks") == server.metric("leaked_leases") == server.metric("leaked_tasks") == 0


async def test_a_key_keeps_everyone_else_out(tiny_path: Path) -> None:
    flags = (str(tiny_path), "--served-model-name", "tiny", "--body-timeout", "2")
    with MillraceServer(*flags, workers=("mixed-0",), environ={"MILLRACE_API_KEY": KEY}) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as raw:
            for case in key_cases(model="tiny", key=KEY):
                if any(value != value.strip() for value in case.headers.values()):
                    continue  # an HTTP client cannot send it
                case.check(await case.send(raw))
            assert (await raw.get("/health")).status_code == 200
        with (
            pytest.raises(AuthenticationError),
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as wrong,
        ):
            wrong.models.list()
        with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as right:
            assert [model.id for model in right.models.list()] == ["tiny"]
        assert (await slow_drip(server.port, key=KEY)).startswith("HTTP/1.1 408 ")
        assert KEY not in server.log()
