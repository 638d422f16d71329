"""Malformed requests as data: what is sent, and the status and field name that must come back.

Any server can be tried with them; they depend on the served model's name and sizes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and its answer. `body` is sent as it stands, or `json` is encoded; `param` is `error.param`."""

    name: str
    status: int
    param: str | None
    method: str = "POST"
    path: str = CHAT
    json: Any = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None  # checked when given

    async def send(self, client: httpx.AsyncClient) -> httpx.Response:
        headers = {"content-type": "application/json", **self.headers}
        if self.body is not None:
            return await client.request(self.method, self.path, content=self.body, headers=headers)
        if self.json is not None:
            return await client.request(self.method, self.path, json=self.json, headers=headers)
        return await client.request(self.method, self.path, headers=self.headers)

    def check(self, response: httpx.Response) -> None:
        """Assert that the answer is the one the case asks for, in OpenAI's shape."""
        assert response.status_code == self.status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == self.param, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"].endswith("_error")
        assert self.code is None or error["code"] == self.code
        assert response.headers["x-request-id"]


def cases(*, model: str, max_model_len: int, vocab_size: int, body_limit: int = 4 * 1024 * 1024) -> list[Case]:
    """All of them, for a server that needs no key."""
    makers = (_fields, _messages, _prompts, _sizes, _bytes, _routes, _tokens)
    return [case for maker in makers for case in maker(model, max_model_len, vocab_size, body_limit)]


def _fields(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    good = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    def chat(name: str, param: str | None, status: int = 400, **changed: Any) -> Case:
        return Case(name=name, status=status, param=param, json={**good, **changed})

    def completion(name: str, param: str, **changed: Any) -> Case:
        body = {"model": model, "prompt": "hi", "max_tokens": 1, **changed}
        return Case(name=name, status=400, param=param, path=COMPLETIONS, json=body)

    yield chat("unknown model", "model", 404, model="no-such-model")
    yield chat("model is a number", "model", model=7)
    yield chat("temperature is text", "temperature", temperature="0.5")
    yield chat("temperature below range", "temperature", temperature=-0.1)
    yield chat("temperature above range", "temperature", temperature=2.1)
    yield chat("top_p zero", "top_p", top_p=0)
    yield chat("top_p above one", "top_p", top_p=1.5)
    yield chat("top_k below minus one", "top_k", top_k=-2)
    yield chat("top_k fractional", "top_k", top_k=1.5)
    yield chat("min_p above one", "min_p", min_p=1.01)
    yield chat("presence_penalty out of range", "presence_penalty", presence_penalty=3)
    yield chat("frequency_penalty out of range", "frequency_penalty", frequency_penalty=-2.5)
    yield chat("repetition_penalty zero", "repetition_penalty", repetition_penalty=0)
    yield chat("n zero", "n", n=0)
    yield chat("n true", "n", n=True)
    yield chat("n huge", "n", n=10**9)
    yield chat("max_tokens zero", "max_tokens", max_tokens=0)
    yield chat("max_tokens negative", "max_tokens", max_tokens=-2)
    yield chat("max_completion_tokens zero", "max_completion_tokens", max_completion_tokens=0)
    yield chat("two different maxima", "max_tokens", max_completion_tokens=2)
    yield chat("min_tokens above max_tokens", "min_tokens", min_tokens=2)
    yield chat("seed too large", "seed", seed=2**64)
    yield chat("seed fractional", "seed", seed=0.5)
    yield chat("stop empty", "stop", stop="")
    yield chat("stop has an empty string", "stop", stop=["a", ""])
    yield chat("stop has a number", "stop[1]", stop=["a", 1])
    yield chat("too many stop strings", "stop", stop=["a"] * 100)
    yield chat("stop_token_ids out of vocabulary", "stop_token_ids[1]", stop_token_ids=[0, vocab_size])
    yield chat("logit_bias for no token", "logit_bias", logit_bias={"x": 1})
    yield chat("logit_bias out of vocabulary", "logit_bias", logit_bias={str(vocab_size): 1})
    yield chat("logit_bias out of range", "logit_bias.0", logit_bias={"0": 101})
    yield chat("logprobs is a number", "logprobs", logprobs=3)
    yield chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=2)
    yield chat("top_logprobs too many", "top_logprobs", logprobs=True, top_logprobs=21)
    yield chat("stream is text", "stream", stream="yes")
    yield chat("stream_options without stream", "stream_options", stream_options={"include_usage": True})
    yield chat("response_format of no kind", "response_format", response_format={"type": "xml"})
    yield chat(
        "response_format without a schema", "response_format.json_schema", response_format={"type": "json_schema"}
    )
    unkept = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    yield chat("a keyword that cannot be kept", "response_format", response_format=unkept)
    yield chat("two forms", "guided_regex", guided_json={}, guided_regex="a")
    yield chat("a form without an end", "ignore_eos", guided_json={}, ignore_eos=True)
    yield from _tools(good)
    yield chat("functions", "functions", functions=[{"name": "f"}])
    yield chat("function_call", "function_call", function_call="auto")
    yield chat("modalities", "modalities", modalities=["text", "audio"])
    yield chat("audio", "audio", audio={"voice": "alloy", "format": "wav"})
    yield chat("prediction", "prediction", prediction={"type": "content", "content": "x"})
    yield chat("web_search_options", "web_search_options", web_search_options={"search_context_size": "low"})
    yield chat("a template of the client's", "chat_template", chat_template="{{ messages }}")
    yield chat("beams", "num_beams", num_beams=4)
    yield chat("mirostat", "mirostat", mirostat=2)
    yield chat("prompt_logprobs", "prompt_logprobs", prompt_logprobs=1)
    yield chat("chat: echo", "echo", echo=True)
    yield chat("two repetition penalties", "repeat_penalty", repetition_penalty=1.1, repeat_penalty=1.2)
    yield chat("repeat_penalty zero", "repeat_penalty", repeat_penalty=0)
    yield chat("max_new_tokens zero", "max_new_tokens", max_new_tokens=0)
    yield chat("logit_bias too long", "logit_bias", logit_bias={str(token): "x" for token in range(5000)})
    yield chat(
        "a field beside a form",
        "response_format.schema",
        response_format={"type": "json_object", "schema": {"type": "string"}},
    )
    yield chat(
        "an option of a form", "structured_outputs.tag", structured_outputs={"json": {}, "tag": {"begin": "<a>"}}
    )
    yield chat("guided_json", "guided_json", guided_json={"type": "strin"})
    yield chat("guided_regex", "guided_regex", guided_regex="(a")
    yield chat("guided_choice", "guided_choice", guided_choice=[])
    yield chat("guided_grammar", "guided_grammar", guided_grammar="start: foo")
    yield chat("gbnf", "structured_outputs.grammar", structured_outputs={"grammar": 'root ::= "a'})
    yield chat("beam search", "use_beam_search", use_beam_search=True)
    yield chat("ttft_slo_ms zero", "ttft_slo_ms", ttft_slo_ms=0)
    yield chat("tpot_slo_ms beyond a day", "tpot_slo_ms", tpot_slo_ms=86_400_001)
    yield chat("service_class unknown", "service_class", service_class="no-such-class")
    yield chat("priority out of range", "priority", priority=10**9)
    yield chat("cache_salt empty", "cache_salt", cache_salt="")
    yield chat("cache_salt a number", "cache_salt", cache_salt=5)
    yield chat("tpot_slo_ms text", "tpot_slo_ms", tpot_slo_ms="fast")
    yield chat("template kwargs take over messages", "chat_template_kwargs", chat_template_kwargs={"messages": []})
    yield chat("continue and generation prompt", "continue_final_message", continue_final_message=True)
    yield completion("suffix", "suffix", suffix="end")
    yield completion("best_of differs from n", "best_of", best_of=2)
    yield completion("completions: logprobs true", "logprobs", logprobs=True)
    yield completion("completions: logprobs too many", "logprobs", logprobs=21)
    yield completion("completions: no output without echo", "max_tokens", max_tokens=0)
    yield completion("completions: messages", "messages", messages=[{"role": "user", "content": "hi"}])
    yield completion("completions: top_logprobs", "top_logprobs", top_logprobs=3)


def _tools(good: dict[str, Any]) -> Iterator[Case]:
    def chat(name: str, param: str, tools: Any, **changed: Any) -> Case:
        return Case(name=f"tools: {name}", status=400, param=param, json={**good, "tools": tools, **changed})

    def tool(name: Any = "f", **changed: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **changed}}

    def named(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"items": nested}
    yield chat("an object", "tools", {})
    yield chat("of another kind", "tools[0].type", [{"type": "web_search"}])
    yield chat("without a function", "tools[1].function", [tool(), {"type": "function"}])
    yield chat("without a name", "tools[0].function.name", [{"type": "function", "function": {}}])
    yield chat("a name of two words", "tools[0].function.name", [tool("two words")])
    yield chat("a long name", "tools[0].function.name", [tool("f" * 65)])
    yield chat("two of one name", "tools[1].function.name", [tool(), tool()])
    yield chat("parameters as text", "tools[0].function.parameters", [tool(parameters="{}")])
    yield chat("nested deep", "tools[0].function.parameters", [tool(parameters=nested)])
    yield chat("too many", "tools", [tool(f"f{i}") for i in range(129)])
    yield chat("too large", "tools", [tool(f"f{i}", description="x" * 100_000) for i in range(3)])
    yield chat("choice of no kind", "tool_choice", [tool()], tool_choice="maybe")
    yield chat("choice of another tool", "tool_choice.function.name", [tool()], tool_choice=named("g"))
    yield chat("choice without tools", "tool_choice", [], tool_choice="required")
    yield chat("named without tools", "tool_choice", None, tool_choice=named("f"))


def _messages(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    def case(name: str, param: str, messages: Any) -> Case:
        return Case(name=name, status=400, param=param, json={"model": model, "messages": messages})

    yield Case(name="messages missing", status=400, param="messages", json={"model": model})
    yield case("messages empty", "messages", [])
    yield case("messages is text", "messages", "hi")
    yield case("message is text", "messages[0]", ["hi"])
    yield case("role missing", "messages[0].role", [{"content": "hi"}])
    yield case("role unknown", "messages[1].role", [{"role": "user", "content": "a"}, {"role": "king", "content": "b"}])
    yield case("a result without its call", "messages[0].tool_call_id", [{"role": "tool", "content": "a"}])
    yield case(
        "a call's id where none belongs",
        "messages[0].tool_call_id",
        [{"role": "user", "content": "", "tool_call_id": "1"}],
    )
    yield case("a result without content", "messages[0].content", [{"role": "tool", "tool_call_id": "1"}])
    yield case("content missing", "messages[0].content", [{"role": "user"}])
    yield case("content null", "messages[0].content", [{"role": "user", "content": None}])
    yield case("content is a number", "messages[0].content", [{"role": "user", "content": 3}])
    yield case(
        "content has an image",
        "messages[0].content[0].type",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    )
    yield case("part without text", "messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}])
    yield case("images", "messages[0].images", [{"role": "user", "content": "x", "images": ["aGk="]}])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name, param, role, calls in (
        ("a call of nothing", "messages[0].tool_calls[0].function", "assistant", [{"id": "1", "type": "function"}]),
        (
            "a call of a number",
            "messages[0].tool_calls[0].function.name",
            "assistant",
            [{**call, "function": {"name": 1, "arguments": ""}}],
        ),
        ("a call of no kind", "messages[0].tool_calls[0].type", "assistant", [{**call, "type": "custom"}]),
        ("a user's call", "messages[0].tool_calls", "user", [call]),
        ("too many calls", "messages[0].tool_calls", "assistant", [call] * 200),
    ):
        yield case(name, param, [{"role": role, "content": "x", "tool_calls": calls}])


def _prompts(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    def case(name: str, param: str, prompt: Any, **more: Any) -> Case:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
        return Case(name=f"prompt: {name}", status=400, param=param, path=COMPLETIONS, json=body)

    yield Case(name="prompt missing", status=400, param="prompt", path=COMPLETIONS, json={"model": model})
    yield case("null", "prompt", None)
    yield case("an object", "prompt", {"text": "hi"})
    yield case("empty list", "prompt", [])
    yield case("empty list in a list", "prompt[1]", [[1], []])
    yield case("text and numbers", "prompt[1]", ["a", 1])
    yield case("numbers and text", "prompt[1]", [1, "a"])
    yield case("lists and numbers", "prompt[1]", [[1], 2])
    yield case("a fraction", "prompt[0]", [0.5])
    yield case("a boolean", "prompt[1]", [1, True])
    yield case("a negative id", "prompt[0]", [-1])
    yield case("an id out of vocabulary", "prompt[0][1]", [[1, vocab_size]])
    yield case("too many prompts", "prompt", ["a"] * 200, n=200)


def _sizes(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    long = {
        "messages": {"model": model, "messages": [{"role": "user", "content": "a b" * max_model_len}]},
        "prompt": {"model": model, "prompt": [1] * max_model_len},
        "prompt[1]": {"model": model, "prompt": ["hi", "a b" * max_model_len]},
        "max_tokens": {"model": model, "prompt": [1], "max_tokens": max_model_len},
    }
    for param, body in long.items():
        path = CHAT if param == "messages" else COMPLETIONS
        code = "context_length_exceeded"
        yield Case(name=f"{param} past the context", status=400, param=param, path=path, json=body, code=code)
    big = b'{"model": "' + b"x" * (10 * 1024 * 1024) + b'"}'
    for path in (CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize"):
        yield Case(name=f"10 MB body to {path}", status=413, param=None, path=path, body=big, code="body_too_large")
    yield Case(name="one byte too many", status=413, param=None, body=b" " * (body_limit + 1))


def _bytes(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    def case(name: str, body: bytes, **more: Any) -> Case:
        return Case(name=name, status=400, param=None, body=body, code="invalid_json", **more)

    start = b'{"model": "' + model.encode() + b'", "prompt": "a", '
    yield case("no body", b"")
    yield case("not JSON", b"hello")
    yield case("half a JSON", start)
    yield case("a JSON list", b"[]")
    yield case("a JSON null", b"null")
    yield case("invalid UTF-8", b'{"model": "\xff\xfe"}')
    yield case("half a surrogate pair", b'{"model": "\\ud83d"}')
    yield case("NaN", start + b'"temperature": NaN}', path=COMPLETIONS)
    yield case("Infinity", start + b'"temperature": Infinity}', path=COMPLETIONS)
    yield case("a number past every float", start + b'"temperature": 1e999}', path=COMPLETIONS)
    yield case("deep JSON", b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    yield case("deep JSON, never closed", b'{"a":' * 200_000)
    deep = b'{"model": "%s", "messages": ' % model.encode() + b"[" * 900 + b"]" * 900 + b"}"
    yield Case(name="deep JSON within the parser's limit", status=400, param="messages[0]", body=deep)
    form = {"content-type": "application/x-www-form-urlencoded"}
    yield Case(name="a form", status=415, param=None, body=b"model=x", headers=form)
    gzip = {"content-encoding": "gzip"}
    yield Case(name="a compressed body", status=415, param=None, body=b"\x1f\x8b\x08", headers=gzip)


def _routes(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    yield Case(name="no such route", status=404, param=None, path="/v1/no-such-thing", json={}, code="unknown_route")
    yield Case(name="route with a slash at its end", status=404, param=None, path=CHAT + "/", json={})
    yield Case(name="no such model card", status=404, param="model", method="GET", path="/v1/models/no-such-model")
    yield Case(name="GET where POST is meant", status=405, param=None, method="GET", path=CHAT)
    yield Case(name="DELETE a model", status=405, param=None, method="DELETE", path=f"/v1/models/{model}")


def _tokens(model: str, max_model_len: int, vocab_size: int, body_limit: int) -> Iterator[Case]:
    def case(name: str, path: str, param: str, status: int = 400, **body: Any) -> Case:
        return Case(name=f"{path}: {name}", status=status, param=param, path=path, json=body)

    message = {"role": "user", "content": "hi"}
    yield case("neither prompt nor messages", "/tokenize", "prompt", model=model)
    yield case("both", "/tokenize", "prompt", prompt="a", messages=[message])
    yield case("prompt is a number", "/tokenize", "prompt", prompt=1)
    yield case("unknown model", "/tokenize", "model", 404, prompt="a", model="no-such-model")
    yield case("no tokens", "/detokenize", "tokens", model=model)
    yield case("text", "/detokenize", "tokens[0]", tokens=["a"])
    yield case("out of vocabulary", "/detokenize", "tokens[1]", tokens=[0, vocab_size])
    yield case("no input", "/v1/embeddings", "input", model=model)
    yield case("unknown model", "/v1/embeddings", "model", 404, input="a", model="no-such-model")
    yield case("out of vocabulary", "/v1/embeddings", "input[1]", input=[0, vocab_size])
    yield case("past the context", "/v1/embeddings", "input", input=[1] * max_model_len)


def strict_cases(*, model: str) -> list[Case]:
    """For a server with --strict-fields; any other answers them."""
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    good = {"model": model, "messages": [message], "max_tokens": 1}

    def chat(name: str, param: str, **changed: Any) -> Case:
        return Case(name=f"strict: {name}", status=400, param=param, json={**good, **changed})

    mood = {"type": "text", "text": "x", "mood": "good"}
    return [
        chat("unknown field", "no_such_field", no_such_field=1),
        chat("unknown field, null", "no_such_field", no_such_field=None),
        chat("unknown stream option", "stream_options.all", stream=True, stream_options={"all": True}),
        chat("unknown message field", "messages[1].mood", messages=[message, {**message, "mood": "good"}]),
        chat(
            "unknown field of a part",
            "messages[0].content[1].mood",
            messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, mood]}],
        ),
        Case(
            name="strict: tokenize", status=400, param="color", path="/tokenize", json={"prompt": "a", "color": "red"}
        ),
        Case(name="strict: detokenize", status=400, param="k", path="/detokenize", json={"tokens": [67], "k": 1}),
    ]


def key_cases(*, model: str, key: str) -> list[Case]:
    """For a server with the one key `key`."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1}
    wrong = {
        "no key": {},
        "wrong key": {"authorization": "Bearer " + "x" * len(key)},
        "beginning of the key": {"authorization": f"Bearer {key[:-1]}"},
        "key and more": {"authorization": f"Bearer {key}x"},
        "empty key": {"authorization": "Bearer "},
        "no scheme": {"authorization": key},
        "wrong scheme": {"authorization": f"Basic {key}"},
        "wrong x-api-key": {"x-api-key": f"{key[:-1]}x"},
        "a scheme in x-api-key": {"x-api-key": f"Bearer {key}"},
    }
    posts = [
        Case(name=name, status=401, param=None, path=COMPLETIONS, json=body, headers=headers, code="invalid_api_key")
        for name, headers in wrong.items()
    ]
    gets = [
        Case(name=f"GET {path} without a key", status=401, param=None, method="GET", path=path)
        for path in ("/v1/models", "/audit", "/load", "/openapi.json", "/no-such-thing")
    ]
    tokenize = Case(name="tokenize without a key", status=401, param=None, path="/tokenize", json={"prompt": "x"})
    return [*posts, *gets, tokenize]


async def endless_upload(client: httpx.AsyncClient, path: str = CHAT) -> tuple[httpx.Response, int]:
    """A chunked body without a length and without an end in sight; how many bytes it took until the answer."""
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(160):
            sent += 65536
            yield b"x" * 65536
            await asyncio.sleep(0)

    response = await client.post(path, content=chunks(), headers={"content-type": "application/json"})
    return response, sent


async def slow_drip(port: int, *, host: str = "127.0.0.1", path: str = CHAT, key: str = "none") -> str:
    """A client on a socket that promises a body and does not send it; the status line and headers it gets."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
    head += f"authorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode() + b'{"model": ')
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), timeout=60)  # to the end: the server must close
    writer.close()
    await writer.wait_closed()
    return answer.decode()
