"""Log-probabilities in the two shapes of the API: a list of objects for chat, parallel lists for completions.

It renders; which tokens are shown is decided in `serving.api.choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.messages import TokenLogprob
from serving.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot write


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One shown token. `start` is where its text begins, in characters of the whole text it belongs to."""

    token: int
    logprob: TokenLogprob | None  # None for the first token of a prompt, which nothing predicts
    start: int


def chat_logprobs(entries: Sequence[LogprobEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion. `bytes` is exact; `token` escapes what is no whole character."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.bytes_of[token]
        return {"token": _readable(spelled), "logprob": max(logprob, LOWEST), "bytes": list(spelled)}

    content = []
    for entry in entries:
        assert entry.logprob is not None, "every output token has a log-probability"
        top = [item(token, logprob) for token, logprob in entry.logprob.top]
        content.append({**item(entry.token, entry.logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[LogprobEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; tokens that are no whole characters read `bytes:\\xe2\\x82`."""

    def name(token: int) -> str:
        spelled = tokenizer.bytes_of[token]
        readable = _readable(spelled)
        return readable if readable.encode() == spelled else f"bytes:{readable}"

    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        ranked = {name(token): max(logprob, LOWEST) for token, logprob in entry.logprob.top}
        ranked.setdefault(name(entry.token), max(entry.logprob.logprob, LOWEST))
        top.append(ranked)
    return {
        "text_offset": [entry.start for entry in entries],
        "token_logprobs": [None if e.logprob is None else max(e.logprob.logprob, LOWEST) for e in entries],
        "tokens": [name(entry.token) for entry in entries],
        "top_logprobs": top,
    }


def _readable(spelled: bytes) -> str:
    """As text; bytes that are no UTF-8 as escapes, so that different tokens read differently."""
    return spelled.decode("utf-8", errors="backslashreplace")
