"""Parses and validates a request's body into a `ResponsePlan`; every 400 of a generation request is raised from here.

Pure apart from the seed of a request that gives none; slow for long texts, so callers may run it in a thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from serving.api.body import parse_body
from serving.api.constraints import Constraints
from serving.api.objectives import Promise, PromiseReader
from serving.api.plan import ChoiceRequest, Kind, RequestHead, ResponsePlan, ThinkingPlan
from serving.api.prompts import Prompt, PromptReader, check_token_ids, prompt_too_long
from serving.api.schema import ChatCompletionBody, CompletionBody, SamplingBody, StreamOptions
from serving.api.settings import ServedModel
from serving.api.thinking import ThinkingReader
from serving.api.tools import AskedTools, ToolReader
from serving.errors import ContextLengthExceeded, InvalidRequest
from serving.messages import Request, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # of a text completion, as in OpenAI's API and vLLM; a chat has the rest of the context
MAX_LOGPROBS = 20
MAX_CHOICES = 256  # sequences of one HTTP request: prompts times n


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the two endpoints have under different names, or by different rules."""

    kind: Kind
    id: str  # of the response
    promise: Promise
    client: str  # tells API keys apart
    prompts: Sequence[Prompt]
    max_tokens: int | None
    logprobs: int | None
    echo: bool = False
    tools: AskedTools | None = None
    thinking: ThinkingPlan | None = None


class Preparer:
    """Turns bodies into plans for one model and tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        *,
        served: ServedModel,
        prompts: PromptReader,
        objectives: PromiseReader,
        constraints: Constraints,
        tools: ToolReader,
        thinking: ThinkingReader,
    ) -> None:
        self._served = served
        self._prompts = prompts
        self._objectives = objectives
        self._constraints = constraints
        self._tools = tools
        self._thinking = thinking

    def chat(self, body: bytes, head: RequestHead) -> ResponsePlan:
        """Raises `InvalidRequest` or `NotFound`, naming the field."""
        fields = parse_body(ChatCompletionBody, body)
        model = self._prompts.model(fields.model)
        tools = self._tools.of(fields)
        prompt = self._prompts.of_messages(
            fields.messages,
            fields,
            tools=(fields.tools or ()) if tools is not None else (),
            add_special_tokens=fields.add_special_tokens,
        )
        asked = _Asked(
            kind="chat",
            id=f"chatcmpl-{head.ids.unique}",
            promise=self._objectives.promise(fields, head),
            client=head.key,
            prompts=[prompt],
            max_tokens=_chat_max_tokens(fields),
            logprobs=_chat_logprobs(fields),
            tools=tools,
            thinking=self._thinking.of(prompt.text or ""),
        )
        return self._plan(fields, model, asked)

    def completion(self, body: bytes, head: RequestHead) -> ResponsePlan:
        """Raises `InvalidRequest` or `NotFound`, naming the field."""
        fields = parse_body(CompletionBody, body)
        model = self._prompts.model(fields.model)
        if fields.best_of is not None and fields.best_of != (fields.n or 1):
            raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
        if fields.max_tokens == 0 and not fields.echo:
            raise InvalidRequest("max_tokens must be at least 1 unless the prompt is echoed", param="max_tokens")
        if fields.logprobs is not None and fields.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be at most {MAX_LOGPROBS}", param="logprobs")
        asked = _Asked(
            kind="completion",
            id=f"cmpl-{head.ids.unique}",
            promise=self._objectives.promise(fields, head),
            client=head.key,
            prompts=self._prompts.of_completion(fields.prompt, add_special_tokens=fields.add_special_tokens),
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            echo=bool(fields.echo),
        )
        return self._plan(fields, model, asked)

    def _plan(self, fields: SamplingBody, model: str, asked: _Asked) -> ResponsePlan:
        _check_choices(fields.n or 1, len(asked.prompts))
        if fields.stream_options is not None and not fields.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        options = fields.stream_options or StreamOptions()
        return ResponsePlan(
            kind=asked.kind,
            id=asked.id,
            created=int(time.time()),
            model=model,
            fingerprint=self._served.fingerprint,
            sequences=tuple(self._sequences(fields, asked)),
            prompt_tokens=sum(len(prompt.tokens) for prompt in asked.prompts),
            stream=bool(fields.stream),
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            stops=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
            include_stop=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            min_tokens=fields.min_tokens,
            logprobs=asked.logprobs,
            return_token_ids=bool(fields.return_token_ids),
            shows_output=asked.max_tokens != 0,
            deadline=asked.promise.deadline,
            tools=None if asked.tools is None else asked.tools.plan,
            thinking=asked.thinking,
        )

    def _sequences(self, fields: SamplingBody, asked: _Asked) -> Iterator[ChoiceRequest]:
        """The choices in order: all of the first prompt, then all of the second."""
        n = fields.n or 1
        grammar = self._constraints.of(fields, asked.tools, asked.thinking)
        for position, prompt in enumerate(asked.prompts):
            room = self._room(prompt, asked)
            text = self._prompts.text_of(prompt, fields.skip_special_tokens) if asked.echo else None
            for number in range(n):
                index = position * n + number
                request = Request(
                    request_id=asked.id if n * len(asked.prompts) == 1 else f"{asked.id}-{index}",
                    prompt=prompt.tokens,
                    sampling=self._sampling(fields, max(room, 1), number, asked.logprobs, grammar),
                    slo=asked.promise.slo,
                    tenant=fields.cache_salt or "",
                    deadline=asked.promise.deadline,
                    service_class=asked.promise.service_class,
                    priority=asked.promise.priority,
                    session=asked.promise.session,
                    client=asked.client,
                    prompt_logprobs=asked.logprobs if asked.echo else None,
                )
                yield ChoiceRequest(index=index, prompt_number=position, request=request, prompt_text=text)

    def _room(self, prompt: Prompt, asked: _Asked) -> int:
        """Output tokens at most: as asked if that fits, else the default or what is left of the context."""
        context, count, max_tokens = self._served.max_model_len, len(prompt.tokens), asked.max_tokens
        room = context - count
        if room < 1:
            raise prompt_too_long(count, context, prompt.param)
        if max_tokens is None:
            return room if asked.kind == "chat" else min(DEFAULT_COMPLETION_TOKENS, room)
        if max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {count} tokens and max_tokens is {max_tokens}: {max_tokens - room} tokens more than "
                f"the model's context of {context}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens

    def _sampling(
        self, fields: SamplingBody, max_tokens: int, number: int, logprobs: int | None, grammar: str
    ) -> SamplingParams:
        if fields.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens = {fields.min_tokens} is more than the {max_tokens} output tokens allowed",
                param="min_tokens",
            )
        check_token_ids(fields.stop_token_ids or [], "stop_token_ids", self._served.vocab_size)
        return SamplingParams(
            max_tokens=max_tokens,
            seed=secrets.randbits(64) if fields.seed is None else choice_seed(fields.seed, number),
            temperature=1.0 if fields.temperature is None else fields.temperature,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            top_k=min(max(fields.top_k or 0, 0), self._served.vocab_size),  # larger ones have no room on the wire
            min_p=fields.min_p or 0.0,
            repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            min_tokens=fields.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids or ())),
            ignore_eos=fields.ignore_eos,
            logprobs=logprobs,
            grammar=grammar,
        )

    def _logit_bias(self, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
        pairs = []
        for key, bias in biases.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < self._served.vocab_size):
                raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id of this model", param="logit_bias")
            pairs.append((int(key), bias))
        return tuple(pairs)


def _check_choices(n: int, prompts: int) -> None:
    if n > MAX_CHOICES:
        raise InvalidRequest(f"n must be at most {MAX_CHOICES}", param="n")
    if n * prompts > MAX_CHOICES:
        raise InvalidRequest(f"{prompts} prompts times n = {n} is more than {MAX_CHOICES} choices", param="prompt")


def _chat_logprobs(fields: ChatCompletionBody) -> int | None:
    if fields.top_logprobs is not None:
        if not fields.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        if fields.top_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be at most {MAX_LOGPROBS}", param="top_logprobs")
    return (fields.top_logprobs or 0) if fields.logprobs else None


def _chat_max_tokens(fields: ChatCompletionBody) -> int | None:
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
    return old if new is None else new


def choice_seed(seed: int, number: int) -> int:
    """The seed, unsigned 64 bits, of the `number`-th sequence for one prompt; the first has the client's own."""
    seed %= 2**64
    if number == 0:
        return seed
    mixed = blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(mixed.digest(), "little")
