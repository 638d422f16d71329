"""A steady load of greedy streams whose text is known, and what became of every one of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import httpx

GRACE_SECONDS = 5.0  # beyond its deadline, until a request counts as one that hangs


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens that greedy decoding goes on with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class Outcome:
    """What came of one request. `silence` is the longest time in which nothing of it came, in seconds."""

    began: float
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    silence: float = 0.0
    exact: bool = False
    error: str | None = None
    hung: bool = False  # nobody ended it, though its deadline had passed


class Client:
    """Asks for completions, and times what comes. Use as an async context manager."""

    def __init__(self, url: str):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: Sequence[int], tokens: int, deadline: float) -> Outcome:
        """A greedy stream of so many tokens, within so many seconds."""
        outcome = Outcome(time.monotonic())
        try:
            async with asyncio.timeout(deadline + GRACE_SECONDS):
                await self._stream(prompt, tokens, deadline, outcome)
        except TimeoutError:
            outcome.hung, outcome.error = True, "it hangs"
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = time.monotonic() - outcome.began
        return outcome

    async def _stream(self, prompt: Sequence[int], tokens: int, deadline: float, outcome: Outcome) -> None:
        body: dict[str, object] = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        body["return_token_ids"] = True
        headers, last, ended = {"x-request-timeout": f"{deadline:g}"}, outcome.began, False
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code}: {(await answer.aread()).decode()}"
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                outcome.silence, last = max(outcome.silence, now - last), now
                ended = line == "data: [DONE]"
                if not ended:
                    self._take(json.loads(line.removeprefix("data: ")), outcome)
        if not ended and outcome.error is None:
            outcome.error = "the stream broke off"

    def _take(self, event: dict[str, object], outcome: Outcome) -> None:
        if "error" in event:
            outcome.error = str(event["error"])
            return
        choices = event.get("choices", [])
        assert isinstance(choices, list)
        for choice in choices:
            outcome.tokens += choice.get("token_ids") or []


class Load:
    """So many streams at any time, one text after the other, from `begin` until `stop` has seen the last one end."""

    def __init__(self, client: Client, texts: Sequence[Text], streams: int, deadline: float):
        self.client = client
        self.texts = texts
        self.streams = streams
        self.deadline = deadline
        self.outcomes: list[Outcome] = []
        self._numbers = count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(self.streams)]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _keep_asking(self) -> None:
        while not self._stopping:
            text = self.texts[next(self._numbers) % len(self.texts)]
            outcome = await self.client.ask(text.prompt, len(text.tokens), self.deadline)
            outcome.exact = tuple(outcome.tokens) == text.tokens
            self.outcomes.append(outcome)
            if outcome.error is not None:
                await asyncio.sleep(0.1)  # a server that refuses at once is not asked in a tight loop
