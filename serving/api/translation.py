"""A body of another API as the chat request that it is served as, and errors in the words of the client's own fields.

Pure. What a translated body may say, and what becomes of it, is decided where chat bodies are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serving.errors import InvalidRequest

_NAME = re.compile(r"[a-z]+(?:_[a-z]+)+")  # a field's name, in an error's words
_STEP = re.compile(r"[.\[][^.\[]*$")  # the last step of a path


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """`chat` is a body of /v1/chat/completions, as JSON has it.

    `places` says what its fields are called in the client's body, by paths such as `messages[3].content`: the longest
    that leads to a field counts. What is not in it has the same name in both.
    """

    chat: Mapping[str, Any]
    places: Mapping[str, str]


def place_of(param: str, places: Mapping[str, str]) -> str:
    """The client's path for a path into the chat body."""
    rest, known = "", param
    while known not in places:
        step = _STEP.search(known)
        if step is None:
            return param
        rest, known = known[step.start() :] + rest, known[: step.start()]
    return places[known] + rest


@contextmanager
def in_clients_words(places: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequest raised inside names the client's fields."""
    try:
        yield
    except InvalidRequest as error:
        param, message = error.param, error.message
        if param is not None:
            shown = place_of(param, places)
            if message.startswith(param):
                message = shown + message[len(param) :]
            else:
                message = _NAME.sub(lambda name: places.get(name[0], name[0]), message)
            param = shown
        raise type(error)(message, param=param, code=error.code, retry_after=error.retry_after) from error
