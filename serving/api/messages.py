"""Anthropic's dialect: /v1/messages, and /v1/messages/count_tokens, which asks nothing of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from serving.api.body import telling
from serving.api.choice import Choice
from serving.api.dialect import PreparedRequest
from serving.api.fields import IgnoredFields
from serving.api.messages_blocks import BlockReader
from serving.api.messages_body import CountTokensBody, MessagesBody, MessagesConversation
from serving.api.messages_translation import chat_of, thinking_is_left
from serving.api.messages_writers import MessagesResult, MessagesStream, MessageWriter
from serving.api.plan import RequestHead, ResponsePlan
from serving.api.prepare import Preparer
from serving.api.prompts import PromptReader
from serving.api.settings import ServedModel
from serving.api.thinking import ThinkingReader
from serving.api.tokens import Answer
from serving.errors import ContextLengthExceeded
from serving.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageForm:
    """`clipped`: the context has less room than was asked for."""

    request: str  # the HTTP request's id
    clipped: bool
    eager: frozenset[str]  # tools whose input is streamed as it is written

    def whole(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> MessagesResult:
        writer = MessageWriter(plan, choices[0], clipped=self.clipped)
        return MessagesResult(writer, BlockReader(), plan.id)

    def stream(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> MessagesStream:
        writer = MessageWriter(plan, choices[0], clipped=self.clipped)
        sure = bool(plan.sequences[0].request.sampling.grammar)  # calls are written by it too
        return MessagesStream(writer, BlockReader(eager=self.eager, sure=sure), plan.id, self.request)


class Messages:
    """Of the endpoint that answers; `count` is the other one's."""

    path = "/v1/messages"
    kind = MessagesBody

    def __init__(
        self, preparer: Preparer, prompts: PromptReader, thinking: ThinkingReader, served: ServedModel
    ) -> None:
        self._preparer = preparer
        self._variables = prompts.template_variables
        self._thinks = thinking.thinks
        self._max_model_len = served.max_model_len

    def prepare(self, body: bytes, head: RequestHead) -> PreparedRequest:
        """Raises `InvalidRequest` or `NotFound`, naming the field as the client knows it."""
        fields, ignored = self._preparer.read(MessagesBody, body)
        with telling(ignored):
            return self._prepared(fields, ignored, head)

    def _prepared(self, fields: MessagesBody, ignored: IgnoredFields, head: RequestHead) -> PreparedRequest:
        asked, ignored = chat_of(fields, self._variables), self._ignored(fields, ignored)
        try:
            plan = self._preparer.translated(asked, ignored, head, f"msg_{head.response_name}", clips=True)
        except ContextLengthExceeded as error:
            count, most = self._preparer.count(asked), self._max_model_len - 1
            told = f"prompt is too long: {count} tokens > {most} maximum"  # Anthropic's words, which clients look for
            raise ContextLengthExceeded(told, param="messages", code=error.code) from error
        form = MessageForm(
            request=head.ids.shown,
            clipped=plan.sequences[0].request.sampling.max_tokens < fields.max_tokens,
            eager=frozenset(tool.name for tool in fields.tools or () if tool.eager_input_streaming),
        )
        return PreparedRequest(plan=replace(plan, shows_output=fields.max_tokens > 0), form=form)

    def count(self, body: bytes) -> Answer:
        """Tokens of the prompt that `prepare` makes. Raises as that does, but not for a prompt that is too long."""
        fields, ignored = self._preparer.read(CountTokensBody, body)
        with telling(ignored):
            count = self._preparer.count(chat_of(fields, self._variables))
        return orjson.dumps({"input_tokens": count}), self._ignored(fields, ignored)

    def _ignored(self, fields: MessagesConversation, ignored: IgnoredFields) -> IgnoredFields:
        if thinking_is_left(fields, self._variables, thinks=self._thinks):
            return ignored.and_hint("thinking", "thinking")
        return ignored
