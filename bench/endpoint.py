"""One server under test: what a request to it looks like, and how one is sent and read.

It speaks OpenAI's completions and chat completions and asks for what every compatible server understands; what a
load consists of and what the times mean is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.connection import HttpClient, TransportError
from bench.sse import CompletionReader, Outcome

Prompt = str | Sequence[int]

READY_POLL_S = 0.5


class ServerError(Exception):
    """A server cannot be measured as asked; the message is one line that says what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a server is and what the tables call it."""

    name: str
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestShape:
    """What every request body has in common. A field of `extra` set to None is left out of the body."""

    model: str
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """The JSON of a streamed request for exactly `output_tokens` tokens."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields: dict[str, Any] = {
            "model": self.model,
            **asked,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True if self.ignore_eos else None,
            **self.extra,
        }
        return orjson.dumps({name: value for name, value in fields.items() if value is not None})


class Endpoint:
    """Sends requests of one shape to one server."""

    def __init__(self, target: Target, client: HttpClient, shape: RequestShape):
        self.target = target
        self.client = client
        self.shape = shape

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """Sends `body` and fills `outcome`, failures included; only a cancellation is raised on."""
        outcome.sent = self.client.clock()
        try:
            response = await self.client.post(self.shape.path, body, CompletionReader(outcome))
        except TransportError as error:
            outcome.fail(error.kind, error.detail)
        except asyncio.CancelledError:
            outcome.fail("interrupted")
            raise
        else:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", response.message())
        finally:
            if outcome.finished is None:
                outcome.finished = self.client.clock()

    async def probe(self, prompt: Prompt) -> Outcome:
        """One request for one token; its `prompt_tokens` are 0 when the server does not report usage."""
        outcome = Outcome(prompt_tokens=0, max_tokens=1)
        await self.send(self.shape.body(prompt, 1), outcome)
        return outcome


async def wait_ready(client: HttpClient, seconds: float) -> None:
    """Waits until the server lists its models, for `seconds` at most; what it lacks then is said by who asks next."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while loop.time() < deadline:
        try:
            if (await client.get("/v1/models")).status < 500:
                return
        except TransportError:  # not listening yet
            pass
        await asyncio.sleep(READY_POLL_S)


async def first_model(client: HttpClient) -> str:
    """The name of the first model a server lists; raises ServerError when it cannot be asked or lists none."""
    try:
        response = await client.get("/v1/models")
    except TransportError as error:
        raise ServerError(f"{error.detail}; start the server or correct --url") from error
    if response.status in (401, 403):
        raise ServerError(f"{client.url} refuses to be asked ({response.message()}); give --api-key or --header")
    if response.status == 503:
        raise ServerError(f"{client.url} is not ready ({response.message()}); wait for it, or let --wait-ready do so")
    try:
        return str(orjson.loads(response.body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ServerError(
            f"{client.url}/v1/models answered {response.status} and names no model; give --model, or correct --url"
        ) from error
