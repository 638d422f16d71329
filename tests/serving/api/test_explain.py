"""Where a request went: in headers, at its endpoint, and told to nobody who does not show its key and salt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from serving.api.explain import RequestNames
from serving.api.plan import RequestIds
from serving.errors import Overloaded, Quarantined
from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, ScriptedGenerate, app_of, calling, saying
from tests.serving.api.plans import plan_of

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


class Known:
    """A serving.api.settings.PlacementLog that knows of every request that has begun."""

    def __init__(self, script: ScriptedGenerate, **words: str):
        self.script = script
        self.words = {"prefill": "p-0", "decode": "d-0", "reason": "slo", "downgrade": "", **words}

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        known = any(request.request_id == request_id for request in self.script.started)
        return self.words if known else None

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        return {"id": request_id} if self.placement(request_id) is not None else None

    def workers(self) -> Mapping[str, Any]:
        return {"workers": [{"name": "p-0"}]}


class Api:
    def __init__(self, tokenizer: Tokenizer, words: dict[str, str] | None = None, **options: Any):
        self.script = ScriptedGenerate(saying(tokenizer, "hello"), before=options.pop("before", None))
        self.app = app_of(self.script, tokenizer, placements=Known(self.script, **(words or {})), **options)

    async def post(self, key: str = "", request_id: str = "", **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        async with calling(self.app) as client:
            return await client.post(CHAT, json={**HELLO, **fields}, headers=headers)

    async def explain(self, name: str, key: str = "", salt: str = "") -> Any:
        headers = {"authorization": f"Bearer {key}"} | ({"x-cache-salt": salt} if salt else {})
        async with calling(self.app) as client:
            return await client.get(f"/v1/requests/{name}/explain", headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_where_it_came_from(tokenizer: Tokenizer, stream: bool) -> None:
    answer = await Api(tokenizer).post(stream=stream)
    assert answer.headers["x-millrace-placement"] == "prefill=p-0;decode=d-0;reason=slo"
    assert "x-millrace-downgrade" not in answer.headers
    downgraded = await Api(tokenizer, {"downgrade": "mixed"}).post(stream=stream)
    assert downgraded.headers["x-millrace-downgrade"] == "mixed"
    assert "x-millrace-degraded" not in downgraded.headers
    degraded = await Api(tokenizer, {"degraded": "slo"}).post(stream=stream)
    assert degraded.headers["x-millrace-degraded"] == "slo"


async def test_a_workers_name_cannot_break_out_of_the_header(tokenizer: Tokenizer) -> None:
    answer = await Api(tokenizer, {"prefill": "p;decode=x\r\nset-cookie: a", "decode": "é"}).post()
    assert answer.headers["x-millrace-placement"] == "prefill=p_decode_x__set-cookie:_a;decode=_;reason=slo"


async def test_an_error_after_placement_says_where_too(tokenizer: Tokenizer) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise Overloaded("no")

    for stream in (False, True):
        answer = await Api(tokenizer, before=refuse).post(stream=stream)
        assert answer.status_code == 429 and "x-millrace-placement" in answer.headers


async def test_one_that_broke_workers_is_not_to_be_sent_again(tokenizer: Tokenizer) -> None:
    async def refuse(request: Request, index: int) -> None:
        raise Quarantined("2 workers died", code="quarantined")

    for stream in (False, True):
        answer = await Api(tokenizer, before=refuse).post(stream=stream)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "quarantined"
        assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers


async def test_a_request_that_was_never_placed_has_no_such_header(tokenizer: Tokenizer) -> None:
    answer = await Api(tokenizer).post(temperature=-1)
    assert answer.status_code == 400 and "x-millrace-placement" not in answer.headers


async def test_a_request_is_found_by_both_its_names_with_all_its_sequences(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer)
    answer = await api.post(request_id="mine", n=3)
    for name in ("mine", answer.json()["id"]):
        found = (await api.explain(name)).json()
        assert found["id"] == name and len(found["sequences"]) == 3
    unknown = await api.explain("another")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_request"


async def test_nobody_reads_anothers(tokenizer: Tokenizer) -> None:
    """Neither with another key, nor without the salt; nor does a name that others use hide one's own."""
    api = Api(tokenizer, api_key="one,two")
    await api.post("one", "same", cache_salt="s")
    assert (await api.explain("same", "one", "s")).status_code == 200
    assert (await api.explain("same", "")).status_code == 401
    for key, salt in (("two", "s"), ("one", ""), ("one", "other"), ("two", "")):
        assert (await api.explain("same", key, salt)).status_code == 404, (key, salt)
    first = (await api.explain("same", "one", "s")).json()
    await api.post("two", "same", cache_salt="s")
    assert (await api.explain("same", "one", "s")).json() == first
    assert (await api.explain("same", "two", "s")).json() != first


async def test_workers_are_behind_the_key(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, api_key="one")
    async with calling(api.app) as client:
        assert (await client.get("/v1/workers")).status_code == 401
        shown = await client.get("/v1/workers", headers={"authorization": "Bearer one"})
    assert shown.json() == {"workers": [{"name": "p-0"}]}


async def test_names_are_kept_in_bounds(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer)
    await api.post()
    names = RequestNames(most=5)
    for number in range(100):
        plan = plan_of(api.script.started[0], id=f"id-{number}")
        names.note(plan, RequestIds(shown=f"shown-{number}", unique=f"shown-{number}"), "")
        assert len(names) <= 10
    assert names.sequences("id-99", "", "") and not names.sequences("id-0", "", "")
