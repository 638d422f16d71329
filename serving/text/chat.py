"""Renders chat messages to a prompt with the model's own Jinja template, in a sandbox that cannot change anything.

Templates come with checkpoints and are not trusted; what they may use (filters, functions, tags) is what
`transformers` offers them. Nothing here tokenizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.errors import InvalidRequest

# Names a request may not set through `chat_template_kwargs`: they have their own fields or are the server's.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# Whatever a template does wrong with the messages it is given; a template is data, so all of these are the request's.
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

# Marks where the final message ends in a rendered prompt; no text of a client contains it by accident.
_END_MARK = "\ue000millrace\ue001end\ue000"


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is its content alone."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A chat template compiled once; rendering is safe from several threads. `variables` are those that it looks at.

    Raises `ValueError` on construction when the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names a template may use, such as "bos_token", to their text."""
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for `messages`, each with at least "role" and "content" (a string), and `tools` as OpenAI's.

        `continue_final_message` ends the prompt right after the last message's content, so that the model goes on
        with it. Raises `InvalidRequest` naming `messages` when the template rejects them.
        """
        conversation = [dict(message) for message in messages]
        if continue_final_message:
            conversation[-1]["content"] += _END_MARK
        try:
            prompt = self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": conversation,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                }
            )
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(f"the chat template rejects the messages: {error}", param="messages") from error
        if not continue_final_message:
            return prompt
        content, mark, _ = prompt.rpartition(_END_MARK)
        if not mark:
            raise InvalidRequest(
                "the chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return content
