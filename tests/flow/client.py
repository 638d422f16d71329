"""Completions from a real server in threads: what arrived, as it arrives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI


@dataclass
class Asked:
    """One completion: its text so far, and how it ended."""

    stream: bool
    body: dict[str, Any]
    text: str = ""
    chunks: int = 0
    finish: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    progressed: threading.Event = field(default_factory=threading.Event)  # ten chunks have come
    done: Future[None] | None = None

    def outcome(self) -> tuple[str, str | None, int, int]:
        """Text, finish reason, prompt tokens, completion tokens: what must not depend on what died."""
        return self.text, self.finish, self.usage["prompt_tokens"], self.usage["completion_tokens"]


class Client:
    """Asks a server; `close()` waits for all answers."""

    def __init__(self, url: str, threads: int = 16):
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.pool = ThreadPoolExecutor(threads)

    def start(self, prompt: Sequence[int], *, stream: bool, max_tokens: int, **sampling: Any) -> Asked:
        """Ask in the background."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, **sampling}
        asked = Asked(stream, body)
        asked.done = self.pool.submit(self._ask, asked)
        return asked

    def _ask(self, asked: Asked) -> None:
        if not asked.stream:
            answer = self.openai.completions.create(**asked.body)
            asked.text, asked.finish = answer.choices[0].text, answer.choices[0].finish_reason
            assert answer.usage is not None
            asked.usage = answer.usage.model_dump()
            return
        with self.openai.completions.create(
            **asked.body, stream=True, stream_options={"include_usage": True}
        ) as chunks:
            for chunk in chunks:
                self._take(asked, chunk)

    def _take(self, asked: Asked, chunk: Any) -> None:
        if chunk.usage is not None:
            asked.usage = chunk.usage.model_dump()
        for choice in chunk.choices:
            assert asked.finish is None, "text after the end"
            asked.text += choice.text
            asked.finish = choice.finish_reason
            asked.chunks += 1
            if asked.chunks == 10:
                asked.progressed.set()

    def finish(self, asked: Sequence[Asked], seconds: float = 120) -> list[tuple[str, str | None, int, int]]:
        """Wait for these and give their outcomes; raises what a request raised."""
        for one in asked:
            assert one.done is not None
            one.done.result(seconds)
        return [one.outcome() for one in asked]

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        self.openai.close()
