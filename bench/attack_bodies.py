"""The worst bodies that were found, by what they cost a server before anything is generated. Pure.

Most are refused, some are answered; none is anything that a client would send.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
LARGEST = 4 << 20  # bytes: the default of --max-body-size
COMPILED = 15 << 10  # of a grammar
SMALL = 2000


@dataclass(frozen=True, slots=True)
class AttackBody:
    """One request of an attack."""

    name: str
    path: str
    body: bytes


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}


def _messages(messages: list[Any]) -> dict[str, Any]:
    return _chat(messages=messages)


def _content(content: Any) -> dict[str, Any]:
    return _messages([{"role": "user", "content": content}])


def _completion(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1}


WORST: Sequence[tuple[str, str, int, Callable[[int], dict[str, Any]]]] = (
    ("a million prompts", COMPLETIONS, LARGEST, lambda n: _completion(["a"] * (n // 4))),
    ("prompts of one id", COMPLETIONS, LARGEST, lambda n: _completion([[7]] * (n // 4))),
    ("many messages", CHAT, LARGEST, lambda n: _messages([{"role": "user", "content": "a"}] * (n // 29))),
    (
        "messages with unknown fields",
        CHAT,
        LARGEST,
        lambda n: _messages([{"role": "user", "content": "a", f"x{i}": 1} for i in range(n // 42)]),
    ),
    ("a text to tokenize", CHAT, LARGEST, lambda n: _content("mill " * (n // 5))),
    ("one long word", CHAT, LARGEST, lambda n: _content("x" * n)),
    (
        "texts of tokens",
        TOKENIZE,
        LARGEST,
        lambda n: {"prompt": "a b" * (n // 3), "return_token_strs": True},
    ),
    ("lists in a content", CHAT, LARGEST, lambda n: _content([[[1]]] * (n // 6))),
    ("many tools", CHAT, LARGEST, lambda n: _chat(tools=[_tool(i) for i in range(n // 82)])),
    ("a slow expression", CHAT, COMPILED, lambda n: _chat(guided_regex="(ab|c)*" * (n // 7))),
)
"""Name, path, the size at which it is worst, and the fields of about so many bytes."""

SMALLER: Sequence[tuple[str, str, int, Callable[[int], dict[str, Any]]]] = (
    *((name, path, SMALL, make) for name, path, size, make in WORST if size == LARGEST),
    ("a list of numbers", CHAT, SMALL, lambda n: _content([1] * (n // 2))),
    (
        "choices with stops and biases",
        CHAT,
        SMALL,
        lambda n: _chat(n=64, stop=["x" * 32] * 16, logit_bias={str(i): 1 for i in range((n - 700) // 9)}),
    ),
    ("nothing", CHAT, SMALL, lambda _: {}),
)


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


def worst_bodies() -> list[AttackBody]:
    """The ten, each at the size at which it costs most, within LARGEST."""
    return [AttackBody(name, path, _written(make, size)) for name, path, size, make in WORST]


def small_bodies() -> list[AttackBody]:
    """Bodies of the same kinds that are short enough to be read on the event loop, and refused by their last field."""
    return [AttackBody(name, path, _written(_refused(make), size)) for name, path, size, make in SMALLER]


def _refused(make: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Checked after the prompt has been tokenized."""
    return lambda size: {**make(size), "stream_options": {}}


def long_prompts(tokens: int, count: int) -> list[AttackBody]:
    """Prompts of so many token ids that have nothing in common: accepted, and to be computed."""
    prompts = [[1000 + (i * 7919 + j * 104_729) % 40_000 for j in range(tokens)] for i in range(count)]
    return [AttackBody(f"prompt {i}", COMPLETIONS, _bytes(_completion(ids))) for i, ids in enumerate(prompts)]


def _written(make: Callable[[int], dict[str, Any]], size: int) -> bytes:
    """As near below `size` as the shape of the body allows."""
    made, asked = _bytes(make(size)), size
    while len(made) > size:
        asked = asked * size // len(made) - 64
        made = _bytes(make(asked))
    return made


def _bytes(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
