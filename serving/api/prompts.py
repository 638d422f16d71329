"""Prompts in every form the API takes them, as token ids: messages, texts, ids and lists of those.

Knows the tokenizer and the chat template, not how a prompt will be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson

from serving.api.conversation import Message, Tool, ToolCall
from serving.api.schema import ChatOptions
from serving.api.settings import ServedModel
from serving.api.tools import template_tools, tools_refused
from serving.errors import ContextLengthExceeded, InvalidRequest, NotFound
from serving.text.chat import RESERVED, ChatTemplate
from serving.text.tokenizer import Tokenizer
from serving.text.tools.prompting import ToolPrompt, tool_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    text: str | None  # as the client wrote it; None when it came as ids
    param: str  # the field it came from


class PromptReader:
    """Raises `InvalidRequest` that names the field, down to the item of a list."""

    def __init__(self, *, tokenizer: Tokenizer, served: ServedModel, tool_call_parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._served = served
        source = tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
        self.template_variables = frozenset[str]() if self._template is None else self._template.variables
        self.tool_prompt: ToolPrompt = tool_prompt(tool_call_parser, self._template, source or "")

    def model(self, name: str | None) -> str:
        """The name the model goes by in the answer. Raises NotFound for any but a served one."""
        if name is None:
            return self._served.names[0]
        if name not in self._served.names:
            raise NotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return name

    def of_messages(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        *,
        tools: Sequence[Tool] = (),
        add_special_tokens: bool = False,
    ) -> Prompt:
        """`tools` are those that the prompt shows."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        variables = options.chat_template_kwargs or {}
        if reserved := sorted(RESERVED & variables.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )
        if tools and self.tool_prompt.form is None:
            raise tools_refused()
        shown, given = [_template_message(message, i) for i, message in enumerate(messages)], None
        if tools or any(message.tool_calls or message.role == "tool" for message in messages):
            shown, given = self.tool_prompt.shown(shown, template_tools(tools))
        text = self._template.render(
            shown,
            tools=given,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=variables,
        )
        return self.of_text(text, "messages", add_special_tokens=add_special_tokens)

    def of_text(self, text: str, param: str, *, add_special_tokens: bool) -> Prompt:
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if not tokens:
            raise InvalidRequest(f"{param}: the prompt is empty", param=param)
        return Prompt(tokens=tokens, text=text, param=param)

    def of_completion(self, prompt: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """One prompt or several: a string, a list of strings, a list of token ids, a list of lists of ids."""
        return list(self.each(prompt, "prompt", add_special_tokens=add_special_tokens))

    def each(
        self, given: Any, field: str, *, add_special_tokens: bool, most: int | None = None, last: int | None = None
    ) -> Iterator[Prompt]:
        """The prompts of a field that has one or several, no more than `most`; of each its `last` tokens, or all.

        Nothing is worked on before it is asked for.
        """
        match given:
            case str():
                yield _shortened(self.of_text(given, field, add_special_tokens=add_special_tokens), last)
            case []:
                raise InvalidRequest(f"{field}: the list is empty", param=field)
            case [str() | list(), *_] if most is not None and len(given) > most:
                raise InvalidRequest(f"{field}: {len(given)} are more than {most}", param=field)
            case [str(), *_]:
                for i, text in enumerate(_all_of(str, given, "a string", field)):
                    prompt = self.of_text(text, f"{field}[{i}]", add_special_tokens=add_special_tokens)
                    yield _shortened(prompt, last)
            case [list(), *_]:
                for i, ids in enumerate(_all_of(list, given, "a list of token ids", field)):
                    yield self._of_ids(ids, f"{field}[{i}]", last)
            case [*_]:
                yield self._of_ids(given, field, last)
            case _:
                raise InvalidRequest(f"{field} must be a string, token ids, or a list of either", param=field)

    def _of_ids(self, ids: list[Any], param: str, last: int | None = None) -> Prompt:
        ids = ids if last is None else ids[-last:]
        if not ids:
            raise InvalidRequest(f"{param}: the prompt is empty", param=param)
        if len(ids) >= self._served.max_model_len:
            # Refused before each id is looked at, so that a body full of ids costs nothing.
            raise context_exceeded(len(ids), 1, self._served.max_model_len, param)
        check_token_ids(ids, param, self._served.vocab_size)
        return Prompt(tokens=tuple(ids), text=None, param=param)

    def text_of(self, prompt: Prompt, skip_special_tokens: bool) -> str:
        """The prompt as it is echoed."""
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.tokens, skip_special_tokens=skip_special_tokens)


def prompt_count(prompt: Any) -> int:
    """How many prompts there are in a completion's field, before any of them is looked at."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1


def context_exceeded(prompt: int, output: int, context: int, param: str) -> ContextLengthExceeded:
    """The error for so many tokens of prompt and output, at least one, that do not fit `context` tokens.

    Its words are OpenAI's, which clients look for to send less, or to ask another model.
    """
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, you requested {prompt + output} tokens "
        f"({prompt} in the messages, {output} in the completion). Please reduce the length of the messages or "
        f"completion. That is {prompt + output - context} tokens too many.",
        param=param,
        code="context_length_exceeded",
    )


def check_token_ids(ids: list[Any], param: str, vocab_size: int) -> None:
    """Raises `InvalidRequest` at the first item that is no token id."""
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            where = f"{param}[{position}]"
            raise InvalidRequest(f"{where}: is not a token id between 0 and {vocab_size - 1}", param=where)


def _shortened(prompt: Prompt, last: int | None) -> Prompt:
    return prompt if last is None else replace(prompt, tokens=prompt.tokens[-last:])


def _all_of(kind: type[Any], items: list[Any], name: str, field: str) -> list[Any]:
    for position, item in enumerate(items):
        if not isinstance(item, kind):
            where = f"{field}[{position}]"
            raise InvalidRequest(f"{where}: is not {name}, as the first one is", param=where)
    return items


def _template_message(message: Message, position: int) -> Mapping[str, Any]:
    """As templates know it: content is one text, arguments are objects, and `developer` is the newer `system`."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    shown = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        where = f"messages[{position}].tool_calls"
        return {
            **shown,
            "tool_calls": [_template_call(call, f"{where}[{i}]") for i, call in enumerate(message.tool_calls)],
        }
    return shown


def _template_call(call: ToolCall, param: str) -> dict[str, Any]:
    """What is no object is a model's mistake, and shown as the text that it is."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):
            parsed = orjson.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    try:
        orjson.dumps(arguments)
    except TypeError as error:
        param = f"{param}.function.arguments"
        raise InvalidRequest(f"{param}: is nested too deep", param=param) from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
