"""How a dataclass of settings is read: one field is a TOML key, an environment variable and a command-line flag.

A TOML file, then the environment (MILLRACE_<FIELD>), then flags; the last one given wins. Unknown keys are errors,
and nothing changes a config after it is built. Sizes in bytes may be written `512MiB`, `4GiB`. Lists are TOML arrays,
several words after a flag, or one text: with commas, or a JSON array.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from serving.errors import InvalidRequest
from serving.given_files import read_given_text

ENV_PREFIX = "MILLRACE_"
_UNITS = {"": 1, **{letter: 1000**n for n, letter in enumerate("kmgt", 1)}}
_UNITS |= {letter + "i": 1024**n for n, letter in enumerate("kmgt", 1)}


class ConfigError(InvalidRequest):
    """A setting is unknown or has no meaning; `param` names it."""


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    secret: bool = False,
    several: bool = False,
) -> Any:
    """A configurable field, a number from `least` to `most`. A `secret` one never appears in output.

    A text of `several` words, with commas between them, may be given as a list is.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "least": least,
        "most": most,
        "secret": secret,
        "several": several,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


C = TypeVar("C")


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MiB`, `1000000` → bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]i?)?[bB]?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 4GiB")
    size = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number")
    return int(size)


def _kind(annotation: Any) -> type:
    """The plain type of a field that may also be None; of a tuple of texts, `tuple`."""
    if get_origin(annotation) is tuple:
        return tuple
    kinds: list[type] = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    return kinds[0]


def _convert(name: str, kind: type, value: Any, rules: Mapping[str, Any]) -> Any:
    """The value as the field's type. Raises ConfigError naming the setting; of a secret, not its value."""
    try:
        value = ",".join(_words(value)) if rules["several"] else _as_kind(kind, value)
        if rules["secret"] and not value:
            raise ConfigError(f"{name} is empty: leave it out to have none", param=name)
    except ValueError as error:
        raise ConfigError(f"{name}: {'not a text' if rules['secret'] else error}", param=name) from None
    choices, least, most = rules["choices"], rules["least"], rules["most"]
    if choices and value not in choices:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}", param=name)
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        bounds = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name}: {value!r} must be {bounds}", param=name)
    return value


def _as_kind(kind: type, value: Any) -> Any:
    """Raises ValueError."""
    if kind is bool:
        return _to_bool(value)
    if kind is tuple:
        return _words(value)
    if kind is int and isinstance(value, str):
        return parse_bytes(value)
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value


def _words(value: Any) -> tuple[str, ...]:
    """A list, or one text with commas or JSON in it, as words; empty ones are dropped. Raises ValueError."""
    given = value if isinstance(value, list | tuple) else [value]
    found: list[str] = []
    for text in given:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is not a text")
        found += _json_words(text) if text.lstrip().startswith("[") else text.split(",")
    return tuple(word for text in found if (word := text.strip()))


def _json_words(text: str) -> list[str]:
    """As vLLM takes lists. Raises ValueError."""
    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{text!r} is not a JSON array of texts")
    return words


def _to_bool(value: Any) -> bool:
    state = configparser.ConfigParser.BOOLEAN_STATES.get(str(value).lower())
    if state is None:
        raise ValueError(f"{value!r} is not true or false")
    return state


def _fields(config: type[C]) -> Iterator[tuple[str, type, Any]]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        yield field.name, _kind(hints[field.name]), field


def add_flags(parser: argparse.ArgumentParser, *configs: type) -> None:
    """A flag for every field of these configs, in a group each; flags not given stay out of the namespace."""
    for config in configs:
        title = (config.__doc__ or config.__name__).strip().splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for name, kind, field in _fields(config):
            flag = "--" + name.replace("_", "-")
            text = field.metadata["help"].replace("%", "%%")
            if field.default not in (None, ()) and not field.metadata["secret"]:
                default = " ".join(field.default) if kind is tuple else field.default
                text += f" (default: {default})"
            form: dict[str, Any] = {"metavar": kind.__name__.upper(), "choices": field.metadata["choices"]}
            if kind is bool:
                form = {"action": argparse.BooleanOptionalAction}
            if kind is tuple or field.metadata["several"]:
                form = {"nargs": "+", "action": "extend", "metavar": "STR"}
            group.add_argument(flag, default=argparse.SUPPRESS, help=text, **form)


def load_file(path: Path | None, known: Sequence[str]) -> dict[str, Any]:
    """A flat TOML file of settings, dashes or underscores. Raises ConfigError on anything unknown."""
    if path is None:
        return {}
    try:
        data = tomllib.loads(read_given_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}", param="config") from None
    found = {key.replace("-", "_"): value for key, value in data.items()}
    for key in found:
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}; known are {', '.join(sorted(known))}", param=key)
    return found


def build(config: type[C], file: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, Any]) -> C:
    """The config from its three sources. Raises ConfigError naming the setting."""
    values = {}
    for name, kind, field in _fields(config):
        variable = ENV_PREFIX + name.upper()
        for source, key, label in (
            (flags, name, "--" + name.replace("_", "-")),
            (environ, variable, variable),
            (file, name, name),
        ):
            if key in source:
                values[name] = _convert(label, kind, source[key], field.metadata)
                break
    return config(**values)


def check_last_word(arguments: Sequence[str], given: Mapping[str, Any], positional: str, *configs: type) -> None:
    """Raises ConfigError where a flag of several words may have taken what was meant as the positional argument.

    `given` is what was parsed of `arguments`. A last word that names no files is taken for what it is given as.
    """
    if given.get(positional) is not None or not arguments:
        return
    for config in configs:
        for name, kind, field in _fields(config):
            words = given.get(name) if kind is tuple or field.metadata["several"] else None
            if words and len(words) > 1 and words[-1] == arguments[-1] and _names_files(words[-1]):
                flag = "--" + name.replace("_", "-")
                shown = "its last word" if field.metadata["secret"] else repr(words[-1])
                told = (
                    f"{flag} takes several words, and {shown} may be the {positional}: put the {positional} first, or"
                )
                raise ConfigError(f"{told} write {flag} with commas between its words", param=name)


def _names_files(word: str) -> bool:
    """A path, or a name on a hub."""
    return "://" not in word and ("/" in word or word.endswith(".gguf") or Path(word).exists())


def names(*configs: type) -> list[str]:
    """Every setting's name."""
    return [field.name for config in configs for field in dataclasses.fields(config)]
