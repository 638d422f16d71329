"""Random bodies against the API: `python -m tests.serving.api.fuzzing --count 100000`.

Good bodies are changed at random places, by values at the ends of every type among others. Whatever is sent, the answer
is no 500 and does not take longer than its budget, and memory stays.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying, tiny_tokenizer

BUDGET_MS = 250.0  # of CPU time an answer, and
BUDGET_MS_PER_KIB = 5.0

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "content": "on", "name": "me"},
            ],
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "n": 2,
            "seed": 7,
            "stop": ["x"],
            "stop_token_ids": [5],
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1.0},
            "logprobs": True,
            "top_logprobs": 2,
            "min_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_class": "standard",
            "ttft_slo_ms": 100.0,
            "tpot_slo_ms": 10.0,
            "priority": 1,
            "cache_salt": "a",
            "chat_template_kwargs": {"a": 1},
            "metadata": {"a": "b"},
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 9,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        },
        {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}], "guided_regex": "a+", "max_tokens": 3},
    ],
    "/v1/completions": [
        {"prompt": "hi", "max_tokens": 3, "echo": True, "logprobs": 2, "best_of": 1},
        {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "n": 2},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {
            "model": "tiny",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "a"},
                        {"type": "redacted_thinking", "data": "a"},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "is_error": True,
                            "content": [{"type": "text", "text": "no"}],
                        },
                    ],
                },
            ],
            "tools": [{"name": "weather", "input_schema": {"type": "object"}, "strict": False}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "me"},
            "temperature": 1,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["x"],
            "stream": True,
            "service_tier": "auto",
            "context_management": {"edits": []},
        },
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"},
        },
    ],
    "/v1/messages/count_tokens": [
        {
            "messages": [{"role": "user", "content": "hi"}],
            "system": "be brief",
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        }
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3, "stream": True, "include": ["message.output_text.logprobs"]},
        {
            "model": "tiny",
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "id": "a", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "7"}]},
            ],
            "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "metadata": {"a": "b"},
            "store": False,
            "truncation": "auto",
            "previous_response_id": None,
            "top_logprobs": 1,
            "max_output_tokens": 3,
        },
        {
            "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "hi"}]}],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}},
            "max_output_tokens": 9,
        },
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "weather"}, {"type": "function", "name": "add", "strict": True}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        },
    ],
    "/v1/embeddings": [
        {"input": "hi"},
        {
            "model": "tiny",
            "input": ["hi", "on"],
            "encoding_format": "base64",
            "dimensions": 8,
            "normalize": False,
            "truncate_prompt_tokens": 2,
            "add_special_tokens": True,
            "user": "me",
            "priority": 1,
        },
        {"input": [[1, 2], [3]], "truncate_prompt_tokens": -1, "cache_salt": "a"},
    ],
    "/tokenize": [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
ENDS: list[Any] = [
    *(None, True, False, "", "a", "\u0000", "\ud83d", "x" * 5000, [], {}, [[]], [None], {"a": None}, [1] * 300),
    *(0, 1, -1, 2**21, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**40),
    *(0.0, -0.0, 1e-320, 1e308, -1e308, 0.1, 1.0, 3.0000001),
    *("auto", "none", "required", "json_object", "user", "tool", "assistant", "{", "(a", "start: a", 'root ::= "a"'),
    *("text", "image", "tool_use", "tool_result", "thinking", "x-anthropic-billing-header:"),
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "function", "function": {"name": "weather"}},
]


ADDED = ("x", "tools", "role", "content", "type", "n", "guided_json", "functions", "stop")


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inside for place in places(part, (*at, key)))]


def end(draw: random.Random) -> Any:
    """One of ENDS, for this body alone: it may be changed further."""
    return copy.deepcopy(draw.choice(ENDS))


def changed(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A copy with up to four changes."""
    made = json.loads(json.dumps(body))
    for _ in range(draw.randint(0, 4)):
        *way, last = draw.choice(places(made)[1:] or [("x",)])
        part = made
        for step in way:
            part = part[step]
        kind = draw.random()
        if kind < 0.15 and isinstance(part, dict):
            part.pop(last, None)
        elif kind < 0.3 and isinstance(part, dict):
            part[draw.choice(ADDED)] = end(draw)
        elif kind < 0.4 and isinstance(part, list):
            part += [end(draw) for _ in range(draw.choice([1, 2, 50]))]
        else:
            part[last] = end(draw)
    return made


def bodies(seed: int) -> tuple[str, bytes]:
    """One request."""
    draw = random.Random(seed)
    path = draw.choice(list(GOOD))
    body = json.dumps(changed(draw, draw.choice(GOOD[path]))).encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(body))
        body = body[:at] + bytes([draw.randrange(256)]) + body[at + draw.randrange(2) :]
    return path, body


@dataclass
class Found:
    """What the answers were, and the slowest."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worst: list[tuple[float, int]] = field(default_factory=list)  # ms, seed


async def fuzz(client: httpx.AsyncClient, seeds: range) -> Found:
    found = Found()
    for seed in seeds:
        path, body = bodies(seed)
        began = time.process_time()
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        spent = 1e3 * (time.process_time() - began)
        found.statuses[answer.status_code] += 1
        found.worst = sorted([*found.worst, (spent, seed)])[-10:]
        if answer.status_code >= 500 or spent > BUDGET_MS + BUDGET_MS_PER_KIB * len(body) / 1024:
            found.wrong.append(f"seed {seed}: {answer.status_code} in {spent:.0f} ms: {path} {body[:300]!r}")
        elif answer.status_code != 200:
            error: Mapping[str, Any] = answer.json()["error"]
            if not error["message"]:
                found.wrong.append(f"seed {seed}: no message")
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(Path(folder))
    total = Found()
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "fine")), tokenizer), timeout=60) as client:
        step = max(1, options.count // 10)
        for first in range(options.seed, options.seed + options.count, step):
            found = await fuzz(client, range(first, min(first + step, options.seed + options.count)))
            total.statuses += found.statuses
            total.wrong += found.wrong
            total.worst = sorted([*total.worst, *found.worst])[-10:]
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"{sum(total.statuses.values())}: {dict(total.statuses)}, {held} MiB at most", flush=True)
    print("slowest:", ", ".join(f"{spent:.0f} ms (seed {seed})" for spent, seed in reversed(total.worst)))
    print("\n".join(total.wrong) or "nothing wrong")


if __name__ == "__main__":
    asyncio.run(main())
