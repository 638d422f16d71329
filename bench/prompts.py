"""Turns abstract prompts into what a server is sent, of the length that was asked for: token ids, or words.

Ids are exact and cost the server no tokenizing, so they come first; where a server refuses them, one-token words
are counted off against the usage it reports. It talks to a server through `bench.endpoint` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from bench.connection import HttpClient, TransportError
from bench.endpoint import Endpoint, Prompt, ServerError
from bench.sse import Outcome
from bench.words import WORDS
from bench.workload import Ask

# Without a tokenizer to ask: ids that are ordinary tokens in every vocabulary of a language model worth measuring.
PLAIN_IDS = tuple(range(1000, 16000))
SHORT_PROBE, LONG_PROBE = 8, 72  # words


class LocalTokenizer:
    """A `tokenizer.json` on this machine."""

    def __init__(self, path: Path):
        """`path` is the file or the model folder that holds it; raises ValueError when it is neither."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"--tokenizer {path}: no tokenizer.json there")
        self._tokenizer = Tokenizer.from_file(str(file))

    async def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def pool(self) -> tuple[int, ...]:
        special = self._tokenizer.get_added_tokens_decoder().keys()
        return tuple(sorted(set(self._tokenizer.get_vocab().values()) - special))


class ServerTokenizer:
    """The server's own `/tokenize`, in the form vLLM gave it or llama.cpp's."""

    def __init__(self, client: HttpClient, model: str):
        self._client = client
        self._model = model
        self._content_form = False  # llama.cpp's

    async def available(self) -> bool:
        """True if the server answers; finds out the form on the way."""
        for self._content_form in (False, True):
            try:
                if await self.encode("word"):
                    return True
            except ServerError:
                continue
        return False

    async def encode(self, text: str) -> list[int]:
        """Raises ServerError when the server has no such endpoint or answers something else."""
        fields: dict[str, object]
        if self._content_form:
            fields = {"content": text, "add_special": False}
        else:
            fields = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            response = await self._client.post("/tokenize", orjson.dumps(fields))
            tokens = orjson.loads(response.body)["tokens"] if response.status == 200 else None
        except (TransportError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ServerError(f"{self._client.url}/tokenize: {error}") from error
        if not isinstance(tokens, list):
            raise ServerError(f"{self._client.url}/tokenize answered {response.status}")
        return tokens

    async def pool(self) -> tuple[int, ...]:
        return tuple(sorted(set(await self.encode(" " + " ".join(WORDS)))))


# What tokenizes as the server does, without special tokens; its `pool` are ordinary tokens to make prompts of.
TokenCounter = LocalTokenizer | ServerTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class IdPrompts:
    """Token ids: one for each piece."""

    pool: tuple[int, ...]
    note: str = ""

    def write(self, ask: Ask) -> Prompt:
        if ask.prompt is not None:
            return ask.prompt
        size = len(self.pool)
        return [self.pool[piece % size] for piece in ask.pieces]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompts:
    """Words: one for each piece, fewer by the tokens that the server adds (start of text, chat template)."""

    words: tuple[str, ...]
    added_tokens: float = 0.0
    tokens_per_word: float = 1.0
    note: str = ""

    def write(self, ask: Ask) -> Prompt:
        if isinstance(ask.prompt, str):
            return ask.prompt
        if ask.prompt is not None:
            raise ValueError("the trace holds token ids, and this endpoint takes text only")
        count = max(1, round((len(ask.pieces) - self.added_tokens) / self.tokens_per_word))
        size = len(self.words)
        return " ".join(self.words[piece % size] for piece in ask.pieces[:count])


# What writes prompts of a wanted length; its `note` is what a reader of the results must know, or nothing.
Prompts = IdPrompts | TextPrompts


async def find_counter(endpoint: Endpoint, tokenizer: Path | None) -> TokenCounter | None:
    """The tokenizer file when one was named, else the server's `/tokenize` if it has one."""
    if tokenizer is not None:
        return LocalTokenizer(tokenizer)
    server = ServerTokenizer(endpoint.client, endpoint.shape.model)
    return server if await server.available() else None


async def choose_prompts(endpoint: Endpoint, counter: TokenCounter | None, form: str) -> Prompts:
    """The prompts for this server. `form` is ids, text or auto: ids where the server takes them.

    Raises ServerError when the server answers neither, with what it said.
    """
    if form == "ids" or (form == "auto" and not endpoint.shape.chat):
        pool = await counter.pool() if counter is not None else PLAIN_IDS
        outcome = await endpoint.probe([pool[index % len(pool)] for index in range(SHORT_PROBE)])
        if outcome.error is None:
            return IdPrompts(pool=pool)
        if form == "ids" or not outcome.error.startswith("HTTP 4"):
            raise _problem(endpoint, outcome)
    return await _measured_text(endpoint, await _one_token_words(counter))


async def _measured_text(endpoint: Endpoint, words: tuple[str, ...]) -> TextPrompts:
    """Two probes tell how many tokens a word is and how many the server adds to any prompt."""
    counts = []
    for length in (SHORT_PROBE, LONG_PROBE):
        outcome = await endpoint.probe(" ".join(words[index % len(words)] for index in range(length)))
        if outcome.error is not None:
            raise _problem(endpoint, outcome)
        counts.append(outcome.prompt_tokens)
    short, long = counts
    if not short or long <= short:
        return TextPrompts(words=words, note="no usage from the server: prompt lengths are as asked, not as counted")
    tokens_per_word = (long - short) / (LONG_PROBE - SHORT_PROBE)
    about = f"prompts are only about as long as asked: {tokens_per_word:.2f} tokens a word"
    return TextPrompts(
        words=words,
        added_tokens=short - SHORT_PROBE * tokens_per_word,
        tokens_per_word=tokens_per_word,
        note="" if tokens_per_word == 1 else about,
    )


async def _one_token_words(counter: TokenCounter | None) -> tuple[str, ...]:
    """The words that are one token each; all of them when there is nothing to ask, or too few would be left."""
    if counter is None or len(await counter.encode(" " + " ".join(WORDS))) == len(WORDS):
        return WORDS
    kept = [word for word in WORDS if len(await counter.encode(" " + word)) == 1]
    return tuple(kept) if len(kept) >= 50 else WORDS


def _problem(endpoint: Endpoint, outcome: Outcome) -> ServerError:
    advice = {
        "refused": "start the server or correct --url",
        "unreachable": "start the server or correct --url",
        "HTTP 401": "give --api-key",
        "HTTP 404": f"the server knows no {endpoint.shape.path} or no model `{endpoint.shape.model}`",
        "HTTP 400": "a field it does not take can be left out with --extra-body '{\"FIELD\": null}'",
    }
    hint = advice.get(outcome.error or "", "the first request must succeed before a load is sent")
    return ServerError(f"{endpoint.target.url}: {outcome.error}: {outcome.detail}; {hint}")
