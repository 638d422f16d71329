"""The chat template that is given instead of the model's own."""

from __future__ import annotations

from pathlib import Path

from serving.given_files import read_given_text
from serving.text.chat import ChatTemplate

_MARKS = ("{{", "{%", "{#")  # in a text that is a template, and in hardly a file's name


def read_chat_template(given: str | None) -> str | None:
    """The template itself, of a file's name or a template; None of none. Raises ValueError that says what is wrong."""
    if given is None:
        return None
    source = given if any(mark in given for mark in _MARKS) else _file(given)
    try:
        ChatTemplate(source, {})
    except ValueError as error:
        raise ValueError(f"--chat-template: {error}") from None
    return source


def _file(name: str) -> str:
    try:
        return read_given_text(Path(name).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template: {error}, and it is no template in Jinja either") from None
