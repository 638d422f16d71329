"""The `openai` package drives a real server on a real socket."""

from __future__ import annotations

import asyncio
import math

import httpx
import openai
import pytest

from serving.errors import Overloaded, WorkerLost
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, listening, logprob_of, saying

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "The mill stands where the river narrows, déjà vu 😀 and on."


def client_at(port: int, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


async def test_chat(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), cached=2)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "length"
    prompt = tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert script.started[0].prompt == tuple(prompt)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode(TEXT))
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.id == script.started[0].request_id


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_streamed_chat(tokenizer: Tokenizer, chunk: int) -> None:
    script = ScriptedGenerate(saying(tokenizer, TEXT), chunk=chunk)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(TEXT))
    assert {c.id for c in chunks} == {script.started[0].request_id}


async def test_several_choices_are_told_apart_and_differ_in_seed(tokenizer: Tokenizer) -> None:
    def by_seed(request: Request) -> list[int]:
        return tokenizer.encode(f"I am {request.sampling.seed}.")

    script = ScriptedGenerate(by_seed, cached=4)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7)
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7, stream=True)
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [choice.message.content for choice in whole.choices]
    assert streamed[0] == "I am 7."  # the first choice has the client's own seed
    assert len(set(streamed)) == 3
    assert len({request.request_id for request in script.started}) == 6
    assert whole.usage.prompt_tokens == len(script.started[0].prompt)
    assert whole.usage.prompt_tokens_details.cached_tokens == 4  # of one prompt, not of three


async def test_seed_decides_and_without_one_each_request_draws_its_own(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        for seed in (11, 11, -1, openai.omit, openai.omit):
            await client.completions.create(model=MODEL, prompt="a", seed=seed)
    seeds = [request.sampling.seed for request in script.started]
    assert seeds[:3] == [11, 11, 2**64 - 1]
    assert seeds[3] != seeds[4]


async def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "é 😀!"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [c.choices[0] async for c in stream]
    content = whole.choices[0].logprobs.content
    tokens = tokenizer.encode("é 😀!")
    assert b"".join(bytes(item.bytes) for item in content).decode() == "é 😀!"
    assert [item.logprob for item in content] == [logprob_of(token, 0).logprob for token in tokens]
    assert all(len(item.top_logprobs) == 2 and item.top_logprobs[0].logprob == item.logprob for item in content)
    assert [item for choice in streamed if choice.logprobs for item in choice.logprobs.content] == content


async def test_completion_logprobs_offsets_and_echo(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, " wheel é"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.completions.create(model=MODEL, prompt="the mill", echo=True, logprobs=1)
        plain = await client.completions.create(model=MODEL, prompt="the mill", logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "the mill wheel é"
    logprobs = choice.logprobs
    prompt = tokenizer.encode("the mill")
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1] == logprob_of(prompt[1], 0).logprob
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(prompt) + len(tokenizer.encode(" wheel é"))
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text.startswith(token, offset)
    assert plain.choices[0].text == " wheel é"
    assert plain.choices[0].logprobs.text_offset[0] == 0


async def test_prompt_alone_is_scored_with_echo_and_no_output(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "unseen"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.completions.create(model=MODEL, prompt="the mill", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "the mill"
    assert len(answer.choices[0].logprobs.tokens) == len(tokenizer.encode("the mill"))
    assert answer.usage.completion_tokens == 0


async def test_stop_string_cuts_and_counts(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "one two END three"))
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, stop=["zzz", "END"])
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stop="END", stream=True)
        streamed = [c.choices[0] async for c in stream]
        kept = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stop="END", extra_body={"include_stop_str_in_output": True}
        )
    assert whole.choices[0].message.content == "one two "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].stop_reason == "END"
    assert whole.usage.completion_tokens == len(tokenizer.encode("one two END"))
    assert "".join(choice.delta.content or "" for choice in streamed) == "one two "
    assert streamed[-1].finish_reason == "stop"
    assert kept.choices[0].message.content == "one two END"
    assert len(script.closed) == len(script.started) == 3


async def test_stop_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_id
    script = ScriptedGenerate(lambda request: [*tokenizer.encode("bye"), eos], eos=eos)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, extra_body={"skip_special_tokens": False}
        )
    assert answer.choices[0].message.content == "bye"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokenizer.encode("bye")) + 1
    assert "".join(item.token for item in answer.choices[0].logprobs.content) == "bye"


async def test_prompts_of_every_form(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(lambda request: request.prompt)
    ids = tokenizer.encode("the mill")
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        one = await client.completions.create(model=MODEL, prompt=ids)
        many = await client.completions.create(model=MODEL, prompt=["a b", "c d"], n=2, max_tokens=100)
        lists = await client.completions.create(model=MODEL, prompt=[ids, ids[:1]], max_tokens=100)
    assert one.choices[0].text == "the mill"
    assert [choice.text for choice in many.choices] == ["a b", "a b", "c d", "c d"]
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in lists.choices] == ["the mill", tokenizer.decode(ids[:1])]
    assert lists.usage.prompt_tokens == len(ids) + 1


async def test_errors_become_the_clients_exceptions(tokenizer: Tokenizer) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise Overloaded("the queue is full", retry_after=2.2)

    app = app_of(ScriptedGenerate(saying(tokenizer, "x"), before=refuse), tokenizer, api_key=KEY)
    async with listening(app) as port, client_at(port) as client:
        for stream in (False, True):  # a stream that never began is refused with a status of its own
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
            assert limited.value.response.headers["retry-after"] == "3"
            assert limited.value.type == "overloaded_error"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=HELLO)
        assert unknown.value.param == "model"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert [model.id async for model in client.models.list()] == [MODEL, "tiny-alias"]
        assert (await client.models.retrieve("tiny-alias")).id == "tiny-alias"


async def test_error_in_mid_stream_is_an_event_and_no_false_ending(tokenizer: Tokenizer) -> None:
    async def break_at_five(request: Request, index: int) -> None:
        if index == 5:
            raise WorkerLost("the worker is gone")

    script = ScriptedGenerate(saying(tokenizer, TEXT), before=break_at_five)
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        seen: set[str | None] = set()
        with pytest.raises(openai.APIError, match="the worker is gone"):
            async for chunk in stream:
                seen.add(chunk.choices[0].finish_reason)
        async with httpx.AsyncClient(timeout=60) as raw:
            body = {"model": MODEL, "messages": HELLO, "stream": True}
            text = (await raw.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)).text
    assert seen == {None}
    assert "[DONE]" not in text
    assert len(script.closed) == 2


async def test_hanging_up_closes_every_iterator(tokenizer: Tokenizer) -> None:
    never = asyncio.Event()

    async def wait_at_three(request: Request, index: int) -> None:
        if index == 3:
            await never.wait()

    script = ScriptedGenerate(saying(tokenizer, TEXT), before=wait_at_three)
    app = app_of(script, tokenizer)
    async with listening(app) as port, client_at(port) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, n=3)
        await anext(aiter(stream))
        assert app.state.in_flight.count == 1
        await stream.close()
        await asyncio.wait_for(script.all_closed.wait(), timeout=60)
        await asyncio.wait_for(app.state.in_flight.wait_idle(), timeout=60)
    assert len(script.started) == len(script.closed) == 3


async def test_lowest_logprob_is_a_number(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    original = script._delta

    def impossible(request: Request, tokens: list[int], start: int):  # type: ignore[no-untyped-def]
        delta = original(request, tokens, start)
        object.__setattr__(delta, "logprobs", tuple(type(lp)(-math.inf, lp.top) for lp in delta.logprobs))
        return delta

    script._delta = impossible  # type: ignore[method-assign]
    async with listening(app_of(script, tokenizer)) as port, client_at(port) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0
