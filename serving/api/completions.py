"""OpenAI's two dialects of generation: chat completions and text completions, with vLLM's extensions."""

from __future__ import annotations

from collections.abc import Sequence

from serving.api.body import telling
from serving.api.choice import Choice
from serving.api.dialect import PreparedRequest
from serving.api.plan import RequestHead, ResponsePlan
from serving.api.prepare import Preparer
from serving.api.results import ChatResultWriter, ResultWriter
from serving.api.schema import ChatCompletionBody, CompletionBody
from serving.api.sse import ChatSseWriter, ParsedSseWriter, SseWriter
from serving.text.tokenizer import Tokenizer


class ChatForm:
    def whole(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> ResultWriter:
        return ChatResultWriter(plan, choices, tokenizer)

    def stream(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> SseWriter:
        return (ParsedSseWriter if plan.parsed else ChatSseWriter)(plan, choices, tokenizer)


class CompletionForm:
    def whole(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> ResultWriter:
        return ResultWriter(plan, choices, tokenizer)

    def stream(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> SseWriter:
        return SseWriter(plan, choices, tokenizer)


class ChatCompletions:
    path = "/v1/chat/completions"
    kind = ChatCompletionBody

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, body: bytes, head: RequestHead) -> PreparedRequest:
        fields, ignored = self._preparer.read(ChatCompletionBody, body)
        with telling(ignored):
            plan = self._preparer.chat(fields, ignored, head, f"chatcmpl-{head.response_name}")
        return PreparedRequest(plan=plan, form=ChatForm())


class Completions:
    path = "/v1/completions"
    kind = CompletionBody

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, body: bytes, head: RequestHead) -> PreparedRequest:
        fields, ignored = self._preparer.read(CompletionBody, body)
        with telling(ignored):
            plan = self._preparer.completion(fields, ignored, head)
        return PreparedRequest(plan=plan, form=CompletionForm())
