"""Parses and validates the body of an embeddings request; every 400 of one is raised from here.

Pure; slow for long texts, so callers may run it in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serving.api.body import parse_body, telling
from serving.api.fields import IgnoredFields
from serving.api.objectives import Promise, PromiseReader
from serving.api.plan import ChoiceRequest, RequestHead
from serving.api.prompts import Prompt, PromptReader, context_exceeded
from serving.api.schema import UNBOUNDED, EmbeddingBody
from serving.api.settings import ServedModel
from serving.errors import InvalidRequest
from serving.messages import Request, SamplingParams

MOST_INPUTS = 2048  # of one HTTP request; both are OpenAI's bounds
MOST_TOKENS = 300_000  # of all of its inputs, where the context is not longer


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan:
    """One HTTP request, validated: a sequence for each input."""

    id: str  # of the response
    created: int  # Unix seconds
    model: str  # the name the client used
    sequences: tuple[ChoiceRequest, ...]
    prompt_tokens: int
    base64: bool  # else lists of numbers
    size: int  # numbers of what the workers send; 0: not known
    dimensions: int | None  # how many of them are wanted; None: all
    normalize: bool
    deadline: float | None  # seconds on the router's clock
    ignored: IgnoredFields


class EmbeddingPreparer:
    """Turns bodies into plans for one model and tokenizer. Safe to use from several threads."""

    def __init__(
        self, served: ServedModel, prompts: PromptReader, objectives: PromiseReader, *, strict_fields: bool = False
    ) -> None:
        self._served = served
        self._form = served.embedding
        self._prompts = prompts
        self._objectives = objectives
        self._strict_fields = strict_fields
        self._longest = served.max_model_len - 1  # tokens: a worker keeps room for one more
        self._most_tokens = max(MOST_TOKENS, self._longest)

    def prepare(self, body: bytes, head: RequestHead) -> EmbeddingPlan:
        """Raises `InvalidRequest` or `NotFound`, naming the field."""
        fields, ignored = parse_body(EmbeddingBody, body, strict=self._strict_fields)
        with telling(ignored):
            return self._plan(fields, ignored, head)

    def _plan(self, fields: EmbeddingBody, ignored: IgnoredFields, head: RequestHead) -> EmbeddingPlan:
        model = self._prompts.model(fields.model)
        if self._form.refusal:
            raise InvalidRequest(self._form.refusal, param="model", code="no_embeddings")
        dimensions = self._dimensions(fields.dimensions)
        promise = self._objectives.promise(fields, head)
        name = f"embd-{head.ids.unique}"
        requests = [
            self._request(fields, f"{name}-{i}", prompt, promise, head) for i, prompt in enumerate(self._inputs(fields))
        ]
        sequences = tuple(
            ChoiceRequest(index=i, prompt_number=i, request=replace(request, alone=len(requests) == 1))
            for i, request in enumerate(requests)
        )
        return EmbeddingPlan(
            id=name,
            created=int(time.time()),
            model=model,
            sequences=sequences,
            prompt_tokens=sum(len(sequence.request.prompt) for sequence in sequences),
            base64=fields.encoding_format == "base64",
            size=self._form.size,
            dimensions=dimensions,
            normalize=self._form.normalize if fields.normalize is None else fields.normalize,
            deadline=promise.deadline,
            ignored=ignored,
        )

    def _request(
        self, fields: EmbeddingBody, name: str, prompt: Prompt, promise: Promise, head: RequestHead
    ) -> Request:
        return Request(
            request_id=name,
            prompt=prompt.tokens,
            sampling=SamplingParams(max_tokens=1),
            slo=promise.slo,
            tenant=head.rights.within(fields.cache_salt or ""),
            deadline=promise.deadline,
            service_class=promise.service_class,
            priority=promise.priority,
            session=promise.session,
            client=head.key,
            pooling=self._form.pooling,
        )

    def _inputs(self, fields: EmbeddingBody) -> Iterator[Prompt]:
        """The inputs, each within the context, and all of them within what one request may have."""
        last, total = self._last(fields.truncate_prompt_tokens), 0
        prompts = self._prompts.each(
            fields.input, "input", add_special_tokens=fields.add_special_tokens, most=MOST_INPUTS, last=last
        )
        for prompt in prompts:
            if len(prompt.tokens) > self._longest:
                raise context_exceeded(len(prompt.tokens), 1, self._served.max_model_len, prompt.param)
            total += len(prompt.tokens)
            if total > self._most_tokens:
                raise InvalidRequest(f"input: more than {self._most_tokens} tokens in all", param="input")
            yield prompt

    def _last(self, wanted: int | None) -> int | None:
        """Of how many tokens of each input there is room for; None: all."""
        if wanted is None or wanted == UNBOUNDED:
            return wanted if wanted is None else self._longest
        if wanted > self._served.max_model_len:
            context = self._served.max_model_len
            raise InvalidRequest(
                f"truncate_prompt_tokens: {wanted} is more than the context of {context} tokens",
                param="truncate_prompt_tokens",
            )
        return min(wanted, self._longest)

    def _dimensions(self, wanted: int | None) -> int | None:
        form = self._form
        if wanted is None or wanted == form.size:
            return None
        if form.dimensions is None:
            raise InvalidRequest(
                f"dimensions: this model does not say that its embeddings can be shortened; they have {form.size}",
                param="dimensions",
            )
        if (form.dimensions and wanted not in form.dimensions) or wanted > form.size:
            known = ", ".join(map(str, form.dimensions)) or f"1 to {form.size}"
            raise InvalidRequest(f"dimensions: {wanted} is none of this model's: {known}", param="dimensions")
        return wanted
