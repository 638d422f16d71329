"""Reads a streamed completion: server-sent events out of bytes, then tokens and their times out of events.

Pure: bytes and times in, an `Outcome` filled. It knows OpenAI's chunk shapes and no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson


class EventSplitter:
    """Cuts a byte stream into the data of its server-sent events, wherever the bytes were split on the way.

    Lines may end in LF or CRLF; comments and fields other than `data` are skipped; several `data` lines of one
    event are joined by LF, as https://html.spec.whatwg.org/multipage/server-sent-events.html asks.
    """

    __slots__ = ("_lines", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # the line that has not ended yet
        self._lines: list[bytes] = []  # `data` lines of the event that has not ended yet

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif not line and self._lines:
                events.append(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
                self._lines = []
        return events

    def close(self) -> list[bytes]:
        """The event a server left without its blank line, if any: some end the stream on `data: [DONE]`."""
        return self.feed(b"\n\n") if self._rest or self._lines else []


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one request gave. Times are seconds on the client's clock; `None` is "never happened"."""

    prompt_tokens: int  # asked for; replaced by the server's count when it reports one
    max_tokens: int  # asked for
    kind: str = ""  # of a mixture
    id: str = ""  # what the server calls it
    scheduled: float = 0.0  # when an open loop wanted it sent
    sent: float = 0.0
    first: float | None = None  # the first chunk that carries a token
    last: float | None = None  # the last one
    finished: float | None = None  # the response's last byte
    gaps: list[float] = field(default_factory=list)  # between chunks that carry tokens
    text: list[str] = field(default_factory=list)
    chunks: int = 0  # that carry a token or more
    token_ids: int = 0  # counted from `token_ids`, for servers that send them
    reported: int | None = None  # usage.completion_tokens
    finish_reason: str | None = None
    done: bool = False  # the stream ended on [DONE]
    error: str | None = None  # its kind, `None` when all went well
    detail: str = ""  # what the server or the system said about the error

    @property
    def output_tokens(self) -> int:
        """Token ids when the server sends them, else its usage, else one token a chunk."""
        if self.token_ids:
            return self.token_ids
        return self.chunks if self.reported is None else self.reported

    @property
    def ttft(self) -> float:
        """Seconds from the send to the first token."""
        assert self.first is not None, "a request without tokens has no time to first token"
        return self.first - self.sent

    @property
    def latency(self) -> float:
        """Seconds from the send to the last token."""
        assert self.last is not None, "a request without tokens has no latency"
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first, as vLLM's benchmark defines it; None for a single token."""
        rest = self.output_tokens - 1
        return (self.latency - self.ttft) / rest if rest > 0 else None

    def fail(self, kind: str, detail: str = "") -> None:
        """Marks the request as failed; the first failure is the one that counts."""
        if self.error is None:
            self.error, self.detail = kind, detail[:300]


class CompletionReader:
    """Fills an `Outcome` from the bytes of one streamed response; hand `feed` to the HTTP client."""

    __slots__ = ("_outcome", "_splitter")

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._splitter = EventSplitter()

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes of the body that arrived at `now`."""
        for event in self._splitter.feed(data):
            self._read(event, now)

    def close(self, now: float) -> None:
        """Takes the end of the response, and decides whether what came was a whole answer."""
        for event in self._splitter.close():
            self._read(event, now)
        outcome = self._outcome
        outcome.finished = now
        if outcome.first is None:
            outcome.fail("no tokens", "the response ended without a single token")
        elif not outcome.done and outcome.finish_reason is None:
            outcome.fail("cut short", "the stream ended with neither a finish_reason nor [DONE]")

    def _read(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._outcome.done = True
            return
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError as error:
            self._outcome.fail("bad chunk", f"{error}: {event[:80]!r}")
            return
        if not isinstance(chunk, dict):
            self._outcome.fail("bad chunk", f"not an object: {event[:80]!r}")
            return
        if "error" in chunk:
            self._outcome.fail("error event", error_message(chunk))
        if not self._outcome.id:
            self._outcome.id = str(chunk.get("id", ""))
        if choices := chunk.get("choices"):
            self._read_choice(choices[0], now)
        if usage := chunk.get("usage"):
            self._outcome.reported = usage.get("completion_tokens", self._outcome.reported)
            self._outcome.prompt_tokens = usage.get("prompt_tokens") or self._outcome.prompt_tokens

    def _read_choice(self, choice: dict[str, Any], now: float) -> None:
        outcome = self._outcome
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta_text(delta)
        ids = choice.get("token_ids")
        finish = choice.get("finish_reason")
        if finish:
            outcome.finish_reason = finish
        if not text and not ids:
            if finish and outcome.chunks:  # a closing chunk of its own: the answer is over now, no token came
                outcome.last = now
                return
            if not finish and delta is not None and "role" in delta:  # says who speaks, before any token
                return
        # Empty text is a token all the same: a special one, or half of a character.
        outcome.chunks += 1
        if ids:
            outcome.token_ids += len(ids)
        if text:
            outcome.text.append(text)
        if outcome.last is None:
            outcome.first = now
        else:
            outcome.gaps.append(now - outcome.last)
        outcome.last = now


def delta_text(delta: dict[str, Any]) -> str:
    """The text of a chat delta: content, reasoning, or the arguments of a tool call."""
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    if not text and (calls := delta.get("tool_calls")):
        function = calls[0].get("function") or {}
        text = function.get("arguments") or function.get("name")
    return text or ""


def error_message(body: dict[str, Any]) -> str:
    """The sentence inside an OpenAI-shaped error body, or the body itself where it has another shape."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message else error)
