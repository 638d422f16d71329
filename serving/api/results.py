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
    """Collects the outputs of each choice until all have ended. This is a text completion's."""

    kind = "text_completion"
    render_logprobs = staticmethod(completion_logprobs)

    def __init__(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._choices = choices
        self._tokenizer = tokenizer
        self._outputs: list[list[ChoiceDelta]] = [[] for _ in choices]

    async def add(self, choice: Choice, output: ChoiceDelta) -> None:
        self._outputs[choice.index].append(output)

    def body(self) -> bytes:
        """The JSON of the complete response."""
        return orjson.dumps(self._result())

    def _result(self) -> dict[str, Any]:
        return {
            **head_of(self._plan, self.kind),
            "choices": [self._shown(choice, self._outputs[choice.index]) for choice in self._choices],
            "usage": usage_of(self._plan, self._choices),
        }

    def _shown(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        logprobs = None
        if self._plan.logprobs is not None:
            logprobs = self.render_logprobs([entry for output in outputs for entry in output.entries], self._tokenizer)
        return {
            "index": choice.index,
            **self._answer(choice, outputs),
            "logprobs": logprobs,
            "finish_reason": outputs[-1].ending,
            "stop_reason": outputs[-1].stop_reason,
            **(self._token_ids(choice, outputs) if self._plan.return_token_ids else {}),
        }

    def _answer(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        return {"text": "".join(output.text for output in outputs)}

    def _token_ids(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        tokens = [token for output in outputs for token in output.tokens]
        return {"token_ids": tokens, "prompt_token_ids": choice.request.prompt}


class ChatResultWriter(ResultWriter):
    kind = "chat.completion"
    render_logprobs = staticmethod(chat_logprobs)

    def _result(self) -> dict[str, Any]:
        result = super()._result()
        if self._plan.return_token_ids:
            result["prompt_token_ids"] = self._choices[0].request.prompt
        return result

    def _answer(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        text = "".join(output.text for output in outputs)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._plan.parsed:
            message |= self._parsed(choice, text, [output for output in outputs if isinstance(output, ParsedDelta)])
        return {"message": message}

    def _token_ids(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        return {"token_ids": [token for output in outputs for token in output.tokens]}

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
