"""Structured output through every path: it follows its form, whoever computes it and whatever goes on beside it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable

import pytest

from serving.errors import MillraceError
from serving.grammar.forms import choice_grammar, json_grammar, regex_grammar
from serving.grammar.grammars import Compile, CompiledGrammar
from serving.messages import Request, SamplingParams
from serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import prompts

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LINES = r"(?:[a-z]{2,8} ){5}[a-z]{2,8}\."


def well_formed(text: str) -> bool:
    value = json.loads(text)
    in_range = 0 <= value["age"] <= 150 and set(value["tags"]) <= {"red", "green"}
    return list(value) == ["name", "age", "tags"] and in_range


FORMS: list[tuple[str, Callable[[str], object]]] = [
    (json_grammar(SCHEMA), well_formed),
    (regex_grammar(LINES), lambda text: re.fullmatch(LINES, text)),
    (choice_grammar(["a river", "a mill"]), lambda text: text in ("a river", "a mill")),
    ("", lambda text: True),  # beside rows without a form
]


def requests(**sampling: object) -> list[Request]:
    """Each form twice: greedy, and drawn."""
    made = []
    for number, prompt in enumerate(prompts(2 * len(FORMS), seed=50)):
        grammar, _ = FORMS[number // 2]
        params = {"max_tokens": 300, "temperature": 0.9 * (number % 2), "seed": number, "grammar": grammar, **sampling}
        made.append(Request(request_id=f"r{number}", prompt=tuple(prompt), sampling=SamplingParams(**params)))  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def tokenizer(tiny_path: object) -> Tokenizer:
    return load_tokenizer(tiny_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [0, 6])
async def test_every_output_follows_its_form(
    make_cluster: ClusterMaker, placement: str, tokenizer: Tokenizer, drafts: int
) -> None:
    """Alone and together, with drafts and without, embedded and split: the same tokens."""
    wanted = requests()
    async with make_cluster("embedded", num_speculative_tokens=0) as cluster:
        expected = [await cluster.tokens(request) for request in wanted]
    for number, tokens in enumerate(expected):
        assert FORMS[number // 2][1](tokenizer.decode(tokens)), tokenizer.decode(tokens)
    async with make_cluster(placement, num_speculative_tokens=drafts) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in wanted)) == expected


async def test_log_probabilities_and_penalties_keep_the_form(make_cluster: ClusterMaker, tokenizer: Tokenizer) -> None:
    wanted = requests(logprobs=2, frequency_penalty=0.5, min_tokens=60)
    async with make_cluster("split-grpc") as cluster:
        found = await asyncio.gather(*(cluster.tokens(request) for request in wanted))
    for number, tokens in enumerate(found[:-2]):
        assert FORMS[number // 2][1](tokenizer.decode(tokens))


async def test_a_grammar_that_does_not_compile_is_one_requests_error(make_cluster: ClusterMaker) -> None:
    """The door refuses it; a router of another version may not."""
    broken = Request(request_id="b", prompt=(5, 6), sampling=SamplingParams(max_tokens=5, grammar="nonsense"))
    async with make_cluster("split-grpc") as cluster:
        good = asyncio.create_task(cluster.tokens(requests()[0]))
        with pytest.raises(MillraceError):
            await cluster.tokens(broken)
        assert await good


@pytest.mark.parametrize("placement", ["embedded", "split-local"])
async def test_a_compile_holds_up_its_own_request_alone(
    make_cluster: ClusterMaker, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come to their end while it lasts, and what waits goes on by itself."""
    held, free, compile_grammar = requests()[0], requests()[-1], Compile.__call__
    go = threading.Event()

    def hanging(self: Compile, grammar: str) -> CompiledGrammar:
        assert go.wait(60)
        return compile_grammar(self, grammar)

    async with make_cluster(placement) as cluster:
        expected = await cluster.tokens(held)
    async with make_cluster(placement) as cluster:
        monkeypatch.setattr(Compile, "__call__", hanging)
        waiting = asyncio.create_task(cluster.tokens(held))
        await asyncio.wait_for(cluster.tokens(free), 60)
        assert not waiting.done()
        go.set()
        assert await asyncio.wait_for(waiting, 60) == expected
        await cluster.idle()
