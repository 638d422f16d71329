"""The endpoints around generation: models, tokens, health, keys, request ids, draining, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json

import pytest

from serving import __version__
from serving.api.body_work import LARGE_BODY
from serving.messages import Request
from serving.proto import millrace_pb2 as pb
from serving.text.tokenizer import Tokenizer, load_tokenizer
from serving.wire import from_pb, to_pb
from tests.fakes.generate import KEY, MAX_MODEL_LEN, MODEL, ScriptedGenerate, app_of, calling, saying
from tests.tiny import write_tokenizer

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


async def test_open_endpoints_need_no_key_and_the_others_do(tokenizer: Tokenizer) -> None:
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, api_key=KEY)
    async with calling(app) as client:
        for path in ("/health", "/live", "/ping", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/v1/models", "/load", "/audit", "/openapi.json"):
            assert (await client.get(path)).status_code == 401, path
            with_key = await client.get(path, headers={"authorization": f"bearer {KEY}"})
            assert with_key.status_code == 200, path
        refused = await client.post(CHAT, json=HELLO)
    assert refused.headers["www-authenticate"] == "Bearer"
    assert KEY not in refused.text


async def test_version_metrics_audit(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        metrics = await client.get("/metrics")
        assert metrics.text == "# nothing\n"
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await client.get("/audit")).json() == {"router": {"counts": {}, "leaked": {}}}


async def test_unhealthy_says_why_and_stays_alive(tokenizer: Tokenizer) -> None:
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer, health=lambda: (False, "no decode worker"))
    async with calling(app) as client:
        for path in ("/health", "/ping"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "no decode worker"
        assert (await client.get("/live")).status_code == 200


async def test_draining_refuses_the_new_and_finishes_the_old(tokenizer: Tokenizer) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, index: int) -> None:
        inside.set()
        await go_on.wait()

    app = app_of(ScriptedGenerate(saying(tokenizer, "done"), before=wait), tokenizer)
    in_flight = app.state.in_flight
    async with calling(app) as client:
        old = asyncio.create_task(client.post(CHAT, json={**HELLO, "stream": True}))
        await asyncio.wait_for(inside.wait(), timeout=60)
        assert (await client.get("/load")).json() == {"server_load": 1}
        in_flight.begin_drain()
        refused = await client.post(CHAT, json=HELLO)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert in_flight.count == 1
        go_on.set()
        await asyncio.wait_for(in_flight.wait_idle(), timeout=60)
        assert "[DONE]" in (await old).text


async def test_request_ids(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer)) as client:
        for wanted, kept in [("trace-7:a.b_C", True), ("", False), ("a b", False), ("x" * 129, False), ("a\tb", False)]:
            response = await client.post(CHAT, json=HELLO, headers={"x-request-id": wanted})
            assert (response.headers["x-request-id"] == wanted) is kept
            assert response.headers["x-request-id"] in script.started[-1].request_id
        for _ in range(2):
            await client.post(CHAT, json=HELLO, headers={"x-request-id": "same"})
    ids = [request.request_id for request in script.started]
    assert len(set(ids)) == len(ids)  # also when a client uses its own id twice


async def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        text = "the mill <|im_end|> é"
        answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert answer["tokens"] == tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == MAX_MODEL_LEN
        back = await client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await client.post("/tokenize", json={"messages": HELLO["messages"]})).json()
        assert tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        plain = {"messages": HELLO["messages"], "add_generation_prompt": False}
        assert (await client.post("/tokenize", json=plain)).json()["count"] < chat["count"]


async def test_a_long_text_does_not_hold_up_the_others(tokenizer: Tokenizer) -> None:
    """The event loop goes on while a body past LARGE_BODY is tokenized."""
    long = {"prompt": "the mill turns. " * 60_000}
    assert len(json.dumps(long)) > LARGE_BODY
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        slow = asyncio.create_task(client.post("/tokenize", json=long))
        answered = 0
        while not slow.done():
            assert (await client.get("/live")).status_code == 200
            answered += 1
            await asyncio.sleep(0)  # calls that never wait give nobody else a turn
        assert slow.result().json()["count"] > 60_000
    assert answered > 3


async def test_messages_of_every_accepted_form(tokenizer: Tokenizer) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    sent_back = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "function_call": None}
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}, sent_back]
    body = {
        "model": MODEL,
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": None,
        "response_format": {"type": "text"},
        "logit_bias": {"7": -100},
        "top_k": -1,
        "ttft_slo_ms": 200,
        "tpot_slo_ms": 50.5,
        "cache_salt": "mine",
    }
    async with calling(app_of(script, tokenizer)) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    (request,) = script.started
    assert tokenizer.decode(request.prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nyes"
    )
    assert request.sampling.logit_bias == ((7, -100.0),)
    assert request.sampling.top_k == 0
    assert request.tenant == "mine"
    assert (request.slo.ttft_ms, request.slo.tpot_ms) == (200, 50.5)


@pytest.mark.parametrize("top_k", [2**31, 2**32, 2**63 - 1])
async def test_the_largest_numbers_of_a_body_fit_on_the_wire(tokenizer: Tokenizer, top_k: int) -> None:
    script = ScriptedGenerate(saying(tokenizer, "x"))
    body = {**HELLO, "top_k": top_k, "seed": 2**64 - 1, "priority": 49, "ttft_slo_ms": 5e-324, "tpot_slo_ms": 8.64e7}
    async with calling(app_of(script, tokenizer)) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    (request,) = script.started
    assert from_pb(to_pb(request, pb.Request), Request).sampling == request.sampling
    assert request.sampling.top_k >= tokenizer.vocab_size, "all tokens are kept"


async def test_output_room(tokenizer: Tokenizer) -> None:
    """Chat may fill the context; a completion has 16 tokens unless it asks, as in OpenAI's API; each bound is exact."""
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer)) as client:
        await client.post(CHAT, json=HELLO)
        await client.post("/v1/completions", json={"model": MODEL, "prompt": [7]})
        await client.post("/v1/completions", json={"model": MODEL, "prompt": [7], "max_tokens": MAX_MODEL_LEN - 1})
        full = await client.post("/v1/completions", json={"model": MODEL, "prompt": [7] * (MAX_MODEL_LEN - 1)})
    assert [request.sampling.max_tokens for request in script.started] == [
        MAX_MODEL_LEN - len(script.started[0].prompt),
        16,
        MAX_MODEL_LEN - 1,
        1,
    ]
    assert full.status_code == 200


async def test_chat_without_a_template(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bare")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), load_tokenizer(folder))) as client:
        response = await client.post(CHAT, json=HELLO)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 200


async def test_openapi_describes_what_is_validated(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        document = (await client.get("/openapi.json")).json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].removeprefix("#/components/schemas/")
    schema = document["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    assert {"messages", "temperature", "ttft_slo_ms"} <= schema["properties"].keys()
    for reference in {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
