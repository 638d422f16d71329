"""Prompts: of the length asked for, whatever the server takes, counted by the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from bench.connection import HttpClient
from bench.endpoint import Endpoint, RequestShape, ServerError, Target, first_model, wait_ready
from bench.prompts import IdPrompts, LocalTokenizer, TextPrompts, choose_prompts, find_counter
from bench.words import WORDS
from bench.workload import Ask, Workload
from tests.fakes.openai_server import ScriptedServer

ASK = Workload(input_len=40, output_len=2).asks(1, seed=0)[0]


@pytest.fixture
async def endpoint(server: ScriptedServer) -> AsyncIterator[Endpoint]:
    client = HttpClient(server.url)
    yield Endpoint(Target(name="it", url=server.url), client, RequestShape(model="scripted"))
    await client.close()


def as_chat(endpoint: Endpoint) -> Endpoint:
    return Endpoint(endpoint.target, endpoint.client, RequestShape(model="scripted", chat=True))


async def test_ids_come_first_and_are_ones_the_server_knows(server: ScriptedServer, endpoint: Endpoint) -> None:
    prompts = await choose_prompts(endpoint, await find_counter(endpoint, None), "auto")
    written = prompts.write(ASK)
    assert isinstance(written, list)
    assert len(written) == 40
    assert set(written) <= {100 + len(word) for word in WORDS}
    assert prompts.note == ""


async def test_a_server_without_ids_gets_words(server: ScriptedServer, endpoint: Endpoint) -> None:
    server.script.takes_ids = False
    prompts = await choose_prompts(endpoint, None, "auto")
    written = prompts.write(ASK)
    assert isinstance(written, str)
    assert len(written.split()) == 40


@pytest.mark.parametrize("added", [0, 1, 17])
async def test_what_a_chat_template_adds_is_taken_off(server: ScriptedServer, endpoint: Endpoint, added: int) -> None:
    server.script.template_tokens = added
    chat = as_chat(endpoint)
    prompts = await choose_prompts(chat, None, "auto")
    await chat.probe(prompts.write(ASK))
    [content] = [message["content"] for message in server.received[-1].body["messages"]]
    assert len(content.split()) + added == 40


async def test_without_usage_the_reader_is_told(server: ScriptedServer, endpoint: Endpoint) -> None:
    server.script.usage = False
    prompts = await choose_prompts(endpoint, None, "text")
    assert "no usage" in prompts.note
    assert len(str(prompts.write(ASK)).split()) == 40


def test_words_of_several_tokens_make_fewer_words() -> None:
    prompts = TextPrompts(words=WORDS, added_tokens=4, tokens_per_word=2.0)
    assert len(prompts.write(ASK).split()) == 18  # type: ignore[union-attr]
    tiny = Ask(pieces=(1,), output_tokens=1)
    assert len(prompts.write(tiny).split()) == 1  # type: ignore[union-attr]


def test_recorded_prompts_are_sent_as_they_are() -> None:
    text, ids = (Ask(pieces=(), output_tokens=1, prompt=prompt) for prompt in ("as it is", (3, 4)))
    assert IdPrompts(pool=(9,)).write(text) == "as it is"
    assert IdPrompts(pool=(9,)).write(ids) == (3, 4)
    assert TextPrompts(words=WORDS).write(text) == "as it is"
    with pytest.raises(ValueError, match="text only"):
        TextPrompts(words=WORDS).write(ids)


@pytest.mark.parametrize("form", ["vllm", "llama.cpp"])
async def test_both_forms_of_tokenize_are_known(server: ScriptedServer, endpoint: Endpoint, form: str) -> None:
    server.script.tokenize = form
    counter = await find_counter(endpoint, None)
    assert counter is not None
    assert await counter.encode("a bc") == [101, 102]


async def test_a_server_without_tokenize_has_no_counter(server: ScriptedServer, endpoint: Endpoint) -> None:
    server.script.tokenize = None
    assert await find_counter(endpoint, None) is None


def word_tokenizer(path: Path, words: list[str]) -> Path:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


async def test_a_tokenizer_file_counts_and_gives_ids(tmp_path: Path, endpoint: Endpoint) -> None:
    folder = word_tokenizer(tmp_path, ["one", "two", "three"])
    for path in (folder, folder / "tokenizer.json"):
        counter = await find_counter(endpoint, path)
        assert isinstance(counter, LocalTokenizer)
        assert await counter.encode("two one two") == [2, 1, 2]
        assert await counter.pool() == (1, 2, 3)  # no special token among them
    with pytest.raises(ValueError, match=r"no tokenizer\.json there"):
        LocalTokenizer(tmp_path / "elsewhere")


async def test_only_one_token_words_are_used_when_they_can_be_told(server: ScriptedServer, endpoint: Endpoint) -> None:
    class Halving:
        """Splits every word that starts with a letter up to m."""

        async def encode(self, text: str) -> list[int]:
            return [0 for word in text.split() for _ in range(2 if word[0] <= "m" else 1)]

        async def pool(self) -> tuple[int, ...]:
            return (1,)

    prompts = await choose_prompts(endpoint, Halving(), "text")
    assert isinstance(prompts, TextPrompts)
    assert prompts.words == tuple(word for word in WORDS if word[0] > "m")


@pytest.mark.parametrize(
    ("status", "form", "advice"),
    [
        (400, "ids", "--extra-body"),
        (401, "auto", "--api-key"),
        (404, "text", "no model"),
        (500, "auto", "must succeed"),
    ],
)
async def test_a_server_that_answers_nothing_is_a_clear_error(
    server: ScriptedServer, endpoint: Endpoint, status: int, form: str, advice: str
) -> None:
    server.script.fail = lambda number: (status, "no")
    with pytest.raises(ServerError, match=advice) as caught:
        await choose_prompts(endpoint, None, form)
    assert f"HTTP {status}: no" in str(caught.value)


async def test_the_model_is_asked_for(server: ScriptedServer, endpoint: Endpoint) -> None:
    assert await first_model(endpoint.client) == "scripted"
    server.script.models_status = 401
    with pytest.raises(ServerError, match="--api-key"):
        await first_model(endpoint.client)


async def test_a_server_that_is_loading_is_waited_for(
    server: ScriptedServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script.models_status = 503
    with pytest.raises(ServerError, match="--wait-ready"):
        await first_model(endpoint.client)

    async def loaded(seconds: float) -> None:
        server.script.models_status = 200

    monkeypatch.setattr(asyncio, "sleep", loaded)
    await wait_ready(endpoint.client, 60.0)
    assert await first_model(endpoint.client) == "scripted"
    await wait_ready(endpoint.client, 0.0)
    assert len(server.received) == 4  # refused, refused once more while waiting, ready, and the name


def test_words_are_all_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
