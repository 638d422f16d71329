"""Turns a request's body into a `ResponsePlan`; every 400 of a generation request is raised from here.

Pure apart from the seed of a request that gives none; slow for long texts, so callers may run it in a thread.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from struct import unpack
from typing import TypeVar

from serving.api.body import Body, checked, parse_body
from serving.api.constraints import output_form
from serving.api.fields import IgnoredFields
from serving.api.objectives import Promise, PromiseReader
from serving.api.plan import ChoiceRequest, RequestHead, ResponsePlan, ThinkingPlan
from serving.api.prompts import Prompt, PromptReader, check_token_ids, context_exceeded, prompt_count
from serving.api.resumption import LAST_EVENT, EventMark, Repeatable, repeatable
from serving.api.schema import UNBOUNDED, ChatCompletionBody, CompletionBody, SamplingBody, StreamOptions
from serving.api.settings import ServedModel
from serving.api.thinking import ThinkingReader
from serving.api.tools import AskedTools, ToolReader
from serving.api.translation import Translation, in_clients_words, place_of
from serving.errors import InvalidRequest
from serving.messages import Request, SamplingParams

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # of a text completion, as in OpenAI's API and vLLM; a chat has the rest of the context
MAX_LOGPROBS = 20
MAX_CHOICES = 256  # sequences of one HTTP request: prompts times n
COMMON = [one.name for one in dataclasses.fields(SamplingParams) if one.name not in ("max_tokens", "seed")]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What chat and text completions have under different names, or by different rules."""

    id: str  # of the response
    attempt: str  # tells requests apart that have the same response
    repeatable: Repeatable | None
    promise: Promise
    client: str  # tells API keys apart
    tenant: str  # who shares cached prefixes
    prompts: Sequence[Prompt]
    max_tokens: int | None  # None: none were named; UNBOUNDED
    usual_tokens: int | None = None  # where none were named; None: the rest of the context
    clips: bool = False  # more than there is room for is as much as there is room for
    logprobs: int | None
    ignored: IgnoredFields
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
        tools: ToolReader,
        thinking: ThinkingReader,
        strict_fields: bool = False,
    ) -> None:
        self._served = served
        self._prompts = prompts
        self._objectives = objectives
        self._strict_fields = strict_fields
        self._tools = tools
        self._thinking = thinking

    def read(self, kind: type[Body], body: bytes) -> tuple[Body, IgnoredFields]:
        """`body` as a `kind`, and what of it was ignored. Raises `InvalidRequest` that names the field."""
        return parse_body(kind, body, strict=self._strict_fields)

    def translated(
        self, asked: Translation, ignored: IgnoredFields, head: RequestHead, name: str, *, clips: bool = False
    ) -> ResponsePlan:
        """As `chat`, for a body of another API: errors name the fields of that."""
        with in_clients_words(asked.places):
            plan = self.chat(checked(ChatCompletionBody, asked.chat), ignored, head, name, clips=clips)
        return replace(plan, form=replace(plan.form, param=place_of(plan.form.param, asked.places)))

    def count(self, asked: Translation) -> int:
        """Tokens of the prompt that `translated` makes, however many. Raises as that does."""
        with in_clients_words(asked.places):
            fields = checked(ChatCompletionBody, asked.chat)
            self._prompts.model(fields.model)
            return len(self._prompt(fields, self._tools.of(fields)).tokens)

    def chat(
        self,
        fields: ChatCompletionBody,
        ignored: IgnoredFields,
        head: RequestHead,
        name: str,
        *,
        clips: bool = False,
    ) -> ResponsePlan:
        """`name` is the response's id; with `clips`, more output than the context has room for is no error.

        Raises `InvalidRequest` or `NotFound`, naming the field.
        """
        model = self._prompts.model(fields.model)
        tools = self._tools.of(fields)
        prompt = self._prompt(fields, tools)
        asked = _Asked(
            id=name,
            attempt=head.ids.unique,
            repeatable=repeatable(head.headers, head.rights.owner),
            promise=self._objectives.promise(fields, head),
            client=head.key,
            tenant=head.rights.within(fields.cache_salt or ""),
            prompts=[prompt],
            max_tokens=_chat_max_tokens(fields),
            clips=clips,
            logprobs=_chat_logprobs(fields),
            ignored=ignored,
            tools=tools,
            thinking=self._thinking.of(prompt.text or "", _continued(fields)),
        )
        return self._plan(fields, model, asked)

    def _prompt(self, fields: ChatCompletionBody, tools: AskedTools | None) -> Prompt:
        return self._prompts.of_messages(
            fields.messages,
            fields,
            tools=(fields.tools or ()) if tools is not None else (),
            add_special_tokens=fields.add_special_tokens,
        )

    def completion(self, fields: CompletionBody, ignored: IgnoredFields, head: RequestHead) -> ResponsePlan:
        """Raises `InvalidRequest` or `NotFound`, naming the field."""
        model = self._prompts.model(fields.model)
        if fields.best_of is not None and fields.best_of != (fields.n or 1):
            raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
        if fields.max_tokens == 0 and not fields.echo:
            raise InvalidRequest("max_tokens must be at least 1 unless the prompt is echoed", param="max_tokens")
        if fields.logprobs is not None and fields.logprobs > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be at most {MAX_LOGPROBS}", param="logprobs")
        _check_choices(fields.n or 1, prompt_count(fields.prompt))
        asked = _Asked(
            id=f"cmpl-{head.response_name}",
            attempt=head.ids.unique,
            repeatable=repeatable(head.headers, head.rights.owner),
            promise=self._objectives.promise(fields, head),
            client=head.key,
            tenant=head.rights.within(fields.cache_salt or ""),
            prompts=self._prompts.of_completion(fields.prompt, add_special_tokens=fields.add_special_tokens),
            max_tokens=_least(fields.max_tokens, fields.max_new_tokens),
            usual_tokens=DEFAULT_COMPLETION_TOKENS,
            logprobs=fields.logprobs,
            ignored=ignored,
            echo=bool(fields.echo),
        )
        return self._plan(fields, model, asked)

    def _plan(self, fields: SamplingBody, model: str, asked: _Asked) -> ResponsePlan:
        _check_choices(fields.n or 1, len(asked.prompts))
        if fields.stream_options is not None and not fields.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        options = fields.stream_options or StreamOptions()
        resumable, after = _resumed(asked.repeatable, fields, len(asked.prompts))
        form = output_form(fields, asked.tools, asked.thinking)
        return ResponsePlan(
            id=asked.id,
            created=int(time.time()) if after is None else after.created,
            model=model,
            fingerprint=self._served.fingerprint,
            sequences=tuple(self._sequences(fields, asked, form.grammar)),
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
            ignored=asked.ignored,
            tools=None if asked.tools is None else asked.tools.plan,
            thinking=asked.thinking,
            form=form,
            resumable=resumable,
            after=after,
        )

    def _sequences(self, fields: SamplingBody, asked: _Asked, grammar: str) -> Iterator[ChoiceRequest]:
        """The choices in order: all of the first prompt, then all of the second."""
        n = fields.n or 1
        sampling = self._sampling(fields, asked, grammar)  # once: it may have as much in it as the body
        common = {name: getattr(sampling, name) for name in COMMON}
        promise, alone = asked.promise, n * len(asked.prompts) == 1
        name, own_seed = asked.id, fields.seed
        if asked.repeatable is not None:
            name = f"{name}-{asked.attempt}"
            own_seed = asked.repeatable.seed if own_seed is None else own_seed
        for position, prompt in enumerate(asked.prompts):
            room = self._room(prompt, asked)
            if fields.min_tokens > max(room, 1):
                raise InvalidRequest(
                    f"min_tokens = {fields.min_tokens} is more than the {max(room, 1)} output tokens allowed",
                    param="min_tokens",
                )
            text = self._prompts.text_of(prompt, fields.skip_special_tokens) if asked.echo else None
            for number, seed in enumerate(_seeds(own_seed, n)):
                index = position * n + number
                request = Request(
                    request_id=name if alone else f"{name}-{index}",
                    prompt=prompt.tokens,
                    sampling=SamplingParams(max_tokens=max(room, 1), seed=seed, **common),
                    slo=promise.slo,
                    tenant=asked.tenant,
                    deadline=promise.deadline,
                    service_class=promise.service_class,
                    priority=promise.priority,
                    session=promise.session,
                    client=asked.client,
                    prompt_logprobs=asked.logprobs if asked.echo else None,
                    alone=alone,
                )
                yield ChoiceRequest(index=index, prompt_number=position, request=request, prompt_text=text)

    def _room(self, prompt: Prompt, asked: _Asked) -> int:
        """Output tokens at most: as asked if that fits, else the default or what is left of the context."""
        context, count, max_tokens = self._served.max_model_len, len(prompt.tokens), asked.max_tokens
        room = context - count
        if room < 1:
            raise context_exceeded(count, max(1, max_tokens or 1), context, prompt.param)
        if max_tokens is None:
            return min(asked.usual_tokens or room, room, self._served.defaults.max_tokens or room)
        if max_tokens == UNBOUNDED or (asked.clips and max_tokens > room):
            return room
        if max_tokens > room:
            raise context_exceeded(count, max_tokens, context, "max_tokens")
        return max_tokens

    def _sampling(self, fields: SamplingBody, asked: _Asked, grammar: str) -> SamplingParams:
        """What all choices have in common."""
        check_token_ids(fields.stop_token_ids or [], "stop_token_ids", self._served.vocab_size)
        defaults = self._served.defaults
        top_k = _given(fields.top_k, defaults.top_k)
        return SamplingParams(
            max_tokens=0,
            temperature=_given(fields.temperature, defaults.temperature),
            top_p=_given(fields.top_p, defaults.top_p),
            top_k=min(max(top_k, 0), self._served.vocab_size),  # larger ones have no room on the wire
            min_p=_given(fields.min_p, defaults.min_p),
            repetition_penalty=_given(_repetition_penalty(fields), defaults.repetition_penalty),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(fields.logit_bias or {}),
            min_tokens=fields.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids or ())),
            ignore_eos=fields.ignore_eos,
            logprobs=asked.logprobs,
            grammar=grammar,
        )

    def _logit_bias(self, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
        pairs, vocab_size = [], self._served.vocab_size
        for key, bias in biases.items():
            token = int(key) if len(key) < 20 and key.isascii() and key.isdecimal() else vocab_size
            if token >= vocab_size:
                raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id of this model", param="logit_bias")
            pairs.append((token, bias))
        return tuple(pairs)


def _resumed(repeatable: Repeatable | None, fields: SamplingBody, prompts: int) -> tuple[bool, EventMark | None]:
    """Whether the events of the answer have ids, and the id after which it begins. Raises InvalidRequest."""
    if repeatable is None:
        return False, None
    resumable = bool(fields.stream) and (fields.n or 1) * prompts == 1
    if repeatable.after is not None and not resumable:
        raise InvalidRequest(f"{LAST_EVENT}: only a stream of one choice can go on", param=LAST_EVENT)
    return resumable, repeatable.after


def _check_choices(n: int, prompts: int) -> None:
    if n > MAX_CHOICES:
        raise InvalidRequest(f"n must be at most {MAX_CHOICES}", param="n")
    if n * prompts > MAX_CHOICES:
        raise InvalidRequest(f"{prompts} prompts times n = {n} is more than {MAX_CHOICES} choices", param="prompt")


def _continued(fields: ChatCompletionBody) -> str:
    """The answer that the model goes on with; empty where it begins one."""
    content = fields.messages[-1].content if fields.continue_final_message else None
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


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
    return _least(old if new is None else new, fields.max_new_tokens)


def _least(*bounds: int | None) -> int | None:
    """The smallest bound of those that are named; UNBOUNDED where there are none but that."""
    named = [bound for bound in bounds if bound is not None]
    return min((bound for bound in named if bound != UNBOUNDED), default=UNBOUNDED if named else None)


def _repetition_penalty(fields: SamplingBody) -> float | None:
    named = {fields.repetition_penalty, fields.repeat_penalty} - {None}
    if len(named) > 1:
        raise InvalidRequest("repeat_penalty and repetition_penalty contradict each other", param="repeat_penalty")
    return named.pop() if named else None


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _seeds(seed: int | None, n: int) -> Sequence[int]:
    """Those of n sequences for one prompt, drawn where the client gives none."""
    if seed is None:
        return unpack(f"<{n}Q", secrets.token_bytes(8 * n))
    return [choice_seed(seed, number) for number in range(n)]


def choice_seed(seed: int, number: int) -> int:
    """The seed, unsigned 64 bits, of the `number`-th sequence for one prompt; the first has the client's own."""
    seed %= 2**64
    if number == 0:
        return seed
    mixed = blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(mixed.digest(), "little")
