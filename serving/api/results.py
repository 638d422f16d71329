"""The body of a response that is not streamed: everything the choices showed, in one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from serving.api.choice import Choice, ChoiceDelta
from serving.api.logprobs import chat_logprobs, completion_logprobs
from serving.api.plan import ResponsePlan
from serving.api.sse import head_of, usage_of
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
        is_chat = self._plan.kind == "chat"
        shape = self._chat_choice if is_chat else self._completion_choice
        result = {
            **head_of(self._plan, "chat.completion" if is_chat else "text_completion"),
            "choices": [shape(choice, self._outputs[choice.index]) for choice in self._choices],
            "usage": usage_of(self._plan, self._choices),
        }
        if is_chat and self._plan.return_token_ids:
            result["prompt_token_ids"] = self._choices[0].request.prompt
        return orjson.dumps(result)

    def _chat_choice(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(output.text for output in outputs), "refusal": None}
        return {"index": choice.index, "message": message, **self._ending(choice, outputs)}

    def _completion_choice(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        text = "".join(output.text for output in outputs)
        shown: dict[str, Any] = {"index": choice.index, "text": text, **self._ending(choice, outputs)}
        if self._plan.return_token_ids:
            shown["prompt_token_ids"] = choice.request.prompt
        return shown

    def _ending(self, choice: Choice, outputs: list[ChoiceDelta]) -> dict[str, Any]:
        logprobs = None
        if self._plan.logprobs is not None:
            render = chat_logprobs if self._plan.kind == "chat" else completion_logprobs
            logprobs = render([entry for output in outputs for entry in output.entries], self._tokenizer)
        shown: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": outputs[-1].stop_reason,
        }
        if self._plan.return_token_ids:
            shown["token_ids"] = [token for output in outputs for token in output.tokens]
        return shown
