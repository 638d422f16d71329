"""A scripted `generate` in the router's place, and the API in front of it: in the event loop or on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from deploy.runtime.http_server import HttpServer, bind
from serving.api.app import create_app
from serving.api.settings import EmbeddingForm, ServedModel
from serving.config import HttpConfig
from serving.messages import Delta, FinishReason, Request, TokenLogprob
from serving.service_config import ServiceConfig
from serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import write_tokenizer

MODEL = "tiny"
VOCAB_SIZE = 384
EMBEDDING_SIZE = 8
MAX_MODEL_LEN = 256
KEY = "sk-test-0123456789"


def tiny_tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return load_tokenizer(folder)


class CountingObserver:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.finished: list[tuple[FinishReason, int]] = []
        self.longest: list[int] = []
        self.refused: list[int] = []
        self.ignored: list[str] = []

    def request_started(self, *, prompt_tokens: int) -> None:
        self.started.append(prompt_tokens)

    def request_finished(self, *, finish: FinishReason, completion_tokens: int) -> None:
        self.finished.append((finish, completion_tokens))

    def response_finished(self, *, most_tokens: int) -> None:
        self.longest.append(most_tokens)

    def request_refused(self, *, status: int) -> None:
        self.refused.append(status)

    def field_ignored(self, name: str) -> None:
        self.ignored.append(name)


@dataclass
class ScriptedGenerate:
    """Plays `tokens(request)` back, `chunk` tokens a delta, and remembers who was started and closed.

    Before output token i it awaits `before(request, i)`, which may wait or raise.
    """

    tokens: Callable[[Request], Sequence[int]]
    chunk: int = 1
    cached: int = 0
    eos: int | None = None
    before: Callable[[Request, int], Any] | None = None
    started: list[Request] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.started.append(request)
        try:
            if request.pooling is not None:
                if self.before is not None:
                    await self.before(request, 0)
                await asyncio.sleep(0)
                yield Delta(index=0, tokens=(), finish=FinishReason.STOP, embedding=embedding_of(request.prompt))
                return
            tokens = list(self.tokens(request))[: request.sampling.max_tokens]
            for start in range(0, len(tokens), self.chunk):
                if self.before is not None:
                    await self.before(request, start)
                await asyncio.sleep(0)  # as a real one, it gives others a turn
                yield self._delta(request, tokens, start)
        finally:
            self.closed.append(request.request_id)
            if len(self.closed) == len(self.started):
                self.all_closed.set()

    def _delta(self, request: Request, tokens: list[int], start: int) -> Delta:
        part = tuple(tokens[start : start + self.chunk])
        finish = None
        if start + len(part) == len(tokens):
            finish = FinishReason.STOP if part[-1] == self.eos else FinishReason.LENGTH
        wanted, prompt_wanted = request.sampling.logprobs, request.prompt_logprobs
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if start == 0 and prompt_wanted is not None:
            prompt_logprobs = (None, *(logprob_of(token, prompt_wanted) for token in request.prompt[1:]))
        return Delta(
            index=start,
            tokens=part,
            logprobs=() if wanted is None else tuple(logprob_of(token, wanted) for token in part),
            finish=finish,
            cached_tokens=self.cached if start == 0 else 0,
            prompt_logprobs=prompt_logprobs,
        )


def embedding_of(prompt: Sequence[int]) -> bytes:
    """Some numbers that are a function of the prompt, made in a few microseconds."""
    bits = blake2b(repr(tuple(prompt)).encode(), digest_size=4 * EMBEDDING_SIZE).digest()
    return (np.frombuffer(bits, "<i4") / np.float32(2**31)).astype("<f4").tobytes()


def logprob_of(token: int, k: int) -> TokenLogprob:
    """Some numbers that are a function of the token, the token itself the best of the k."""
    return TokenLogprob(-token / 100, tuple(((token + i) % VOCAB_SIZE, -token / 100 - i) for i in range(k)))


def saying(tokenizer: Tokenizer, text: str) -> Callable[[Request], list[int]]:
    """Every request gets the tokens of `text`."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return lambda request: tokens


def app_of(script: ScriptedGenerate, tokenizer: Tokenizer, **options: Any) -> FastAPI:
    """The API before `script`. Options are those of `create_app`, or of `HttpConfig` or `ServiceConfig`."""
    config = {name: options.pop(name) for name in list(options) if name in HttpConfig.__dataclass_fields__}
    service = {name: options.pop(name) for name in list(options) if name in ServiceConfig.__dataclass_fields__}
    given: dict[str, Any] = {
        "served": ServedModel(
            names=(MODEL, "tiny-alias"),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            created=1_700_000_000,
            embedding=EmbeddingForm(size=EMBEDDING_SIZE),
        ),
        "config": HttpConfig(**config),
        "service_config": ServiceConfig(**service),
        "health": lambda: (True, ""),
        "audit": _empty_audit,
        "metrics_text": lambda: b"# nothing\n",
        "observer": CountingObserver(),
    }
    return create_app(script.generate, tokenizer=tokenizer, **{**given, **options})


async def _empty_audit() -> dict[str, Any]:
    return {"router": {"counts": {}, "leaked": {}}}


@asynccontextmanager
async def calling(app: FastAPI, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the app directly; a bug in the app is an answer, as it is behind a real server."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", **options) as client:
        yield client


@asynccontextmanager
async def listening(app: FastAPI, **config: Any) -> AsyncIterator[int]:
    """The app on a real socket of this event loop; gives the port. `config` is of `HttpConfig`."""
    server = HttpServer(app, bind("127.0.0.1", 0), HttpConfig(**config))
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop()


def events(lines: Iterable[str]) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
