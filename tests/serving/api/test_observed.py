"""What is told of answers: method, endpoint, status and time, for every one that was given, and for no probe."""

from __future__ import annotations

from serving.messages import Request
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import KEY, MODEL, ScriptedGenerate, app_of, calling, saying

BODY = {"model": MODEL, "prompt": "Hello"}


class Told:
    def __init__(self) -> None:
        self.answers: list[tuple[str, str, int]] = []

    def answered(self, *, method: str, handler: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append((method, handler, status))


async def test_every_answer_is_told_once_and_probes_are_not(tokenizer: Tokenizer) -> None:
    async def break_down(request: Request, index: int) -> None:
        raise RuntimeError("a bug")

    told, script = Told(), ScriptedGenerate(saying(tokenizer, "x"))
    app = app_of(script, tokenizer, http_observer=told, api_key=KEY)
    async with calling(app) as client:
        for path in ("/health", "/metrics", "/live"):
            await client.get(path)
        await client.post("/v1/completions", json=BODY)
        client.headers["authorization"] = f"Bearer {KEY}"
        await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json={**BODY, "stream": True})
        await client.get("/v1/models/tiny")
        await client.get("/v1/no/such/thing")
        script.before = break_down
        await client.post("/v1/completions", json=BODY)
    assert told.answers == [
        ("POST", "none", 401),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/models/{name:path}", 200),
        ("GET", "none", 404),
        ("POST", "/v1/completions", 500),
    ]
