"""The body of a response that is not streamed: everything the choices showed, in one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from serving.api.choice import Choice, ChoiceDelta, ParsedDelta
from serving.api.logprobs import chat_logprobs, completion_logprobs
from serving.api.plan import ResponsePlan
from serving.api.sse import head_of, usage_of
from serving.api.tools import call_id
from serving.text.tokenizer import Tokenizer


class ResultWriter:
    """Collects the outputs of each choice until all have ended."""

    def __init__(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._choices = choices
        self._tokenizer = tokenizer
        self._outputs: list[list[ChoiceDelta]] = [[] for _ in choices]

    async def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        self._outputs[choice.index].append(delta)

    def body(self) -> bytes:
        """The JSON of the complete response."""
        kind = "chat.completion" if self._plan.is_chat else "text_completion"
        result = {
            **head_of(self._plan, kind),
            "choices": [self._shown(choice, self._outputs[choice.index]) for choice in self._choices],
            "usage": usage_of(self._plan, self._choices),
        }
        if self._plan.is_chat and self._plan.return_token_ids:
            result["prompt_token_ids"] = self._choices[0].request.prompt
        return orjson.dumps(result)

    def _shown(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        plan, text = self._plan, "".join(output.text for output in outputs)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if plan.parsed:
            message |= self._parsed(choice, text, [output for output in outputs if isinstance(output, ParsedDelta)])
        logprobs = None
        if plan.logprobs is not None:
            render = chat_logprobs if plan.is_chat else completion_logprobs
            logprobs = render([entry for output in outputs for entry in output.entries], self._tokenizer)
        shown: dict[str, Any] = {
            "index": choice.index,
            **({"message": message} if plan.is_chat else {"text": text}),
            "logprobs": logprobs,
            "finish_reason": outputs[-1].ending,
            "stop_reason": outputs[-1].stop_reason,
        }
        if plan.return_token_ids:
            shown["token_ids"] = [token for output in outputs for token in output.tokens]
            if not plan.is_chat:
                shown["prompt_token_ids"] = choice.request.prompt
        return shown

    def _parsed(self, choice: Choice, text: str, outputs: list[ParsedDelta]) -> dict[str, Any]:
        """Thoughts and calls; beside them content may be null."""
        parts: dict[str, Any] = {}
        if thoughts := "".join(output.thoughts for output in outputs):
            parts["reasoning_content"] = thoughts
        if calls := self._calls(choice, outputs):
            parts["tool_calls"] = calls
        return {"content": text or None, **parts} if parts else {}

    def _calls(self, choice: Choice, outputs: list[ParsedDelta]) -> list[dict[str, Any]]:
        names: list[str] = []
        arguments: list[list[str]] = []
        for delta in (call for output in outputs for call in output.calls):
            if delta.name is not None:
                names.append(delta.name)
                arguments.append([])
            arguments[delta.index].append(delta.arguments)
        return [
            {
                "id": call_id(self._plan.id, choice.index, index),
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments[index])},
            }
            for index, name in enumerate(names)
        ]
