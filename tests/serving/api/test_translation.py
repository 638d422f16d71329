"""Errors of a translated body name the client's own fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.translation import in_clients_words, place_of
from serving.errors import ContextLengthExceeded, InvalidRequest

PLACES = {
    "messages": "input",
    "messages[0]": "instructions",
    "messages[2]": "input[1]",
    "messages[2].tool_calls[0].function": "input[4]",
    "tools[0].function": "tools[0]",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("messages", "input"),
        ("messages[0].content", "instructions.content"),
        ("messages[2].content[0].text", "input[1].content[0].text"),
        ("messages[2].tool_calls[0].function.arguments", "input[4].arguments"),
        ("messages[1]", "input[1]"),
        ("tools[0].function.name", "tools[0].name"),
        ("tools[1].function.name", "tools[1].function.name"),
        ("max_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
        ("", ""),
    ],
)
def test_the_longest_path_that_is_known_counts(param: str, shown: str) -> None:
    assert place_of(param, PLACES) == shown


@given(st.text(alphabet="ab[].", max_size=12), st.dictionaries(st.text(alphabet="ab[].", max_size=6), st.just("x")))
def test_any_path_has_a_place(param: str, places: dict[str, str]) -> None:
    shown = place_of(param, places)
    assert shown == param or any(param.startswith(known) and shown == "x" + param[len(known) :] for known in places)


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("messages[0].content: is required", "messages[0].content", "instructions.content: is required"),
        ("5 in the messages are too many", "messages", "5 in the messages are too many"),
        ("tool_choice and response_format exclude", "response_format", "tool_choice and text.format exclude"),
        ("response_format: no", "response_format", "text.format: no"),
        ("temperature: no", "temperature", "temperature: no"),
    ],
)
def test_errors_are_in_the_clients_words(message: str, param: str, told: str) -> None:
    with pytest.raises(ContextLengthExceeded) as raised, in_clients_words(PLACES):
        raise ContextLengthExceeded(message, param=param, code="c")
    assert raised.value.message == told
    assert raised.value.param == place_of(param, PLACES)
    assert raised.value.code == "c"


def test_an_error_without_a_field_stays() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format$"), in_clients_words(PLACES):
        raise InvalidRequest("response_format")
