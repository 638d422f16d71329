"""Flags that take several words: what follows them is not taken for the model, or the user is told."""

from __future__ import annotations

import pytest

from deploy.cli import make_parser
from deploy.runtime.settings import CONFIGS, read_settings
from serving.options import ConfigError, check_last_word


def given(*arguments: str) -> dict[str, object]:
    parsed = vars(make_parser().parse_args(["serve", *arguments]))
    check_last_word(["serve", *arguments], parsed, "model", *CONFIGS)
    return parsed


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_a_model_at_the_end_is_not_taken_for_another_word(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} takes several words.*put the model first") as caught:
        given(flag, "secret-1", "./model")
    assert ("secret-1" not in caught.value.message) and (flag != "--api-key" or "./model" not in caught.value.message)


def test_what_is_clear_is_taken_as_it_is() -> None:
    assert given("./model", "--served-model-name", "a", "b")["model"] == "./model"
    assert given("--served-model-name", "a,b")["model"] is None
    assert given("--served-model-name", "a", "b")["model"] is None
    assert given("--allowed-origins", "https://a.example", "https://b.example")["model"] is None
    assert given("--api-key", "a")["model"] is None


def test_a_flag_given_twice_adds_up() -> None:
    names = ("--served-model-name", "x", "--served-model-name", "y")
    settings = read_settings(given("--api-key", "a", "--api-key", "b", *names))
    assert settings.http.api_key == "a,b"
    assert settings.model_config.served_model_name == ("x", "y")


@pytest.mark.parametrize("key", ["", " , ", ","])
def test_an_empty_key_is_no_open_door(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--api-key is empty"):
        read_settings(given("--api-key", key))
    monkeypatch.setenv("MILLRACE_API_KEY", key)
    with pytest.raises(ConfigError, match="MILLRACE_API_KEY is empty"):
        read_settings(given())
