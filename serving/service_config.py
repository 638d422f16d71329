"""What requests are promised and how many there may be, as configured: classes, rate limits, keys, split or not.

A file of classes is TOML with a table for each; what it may not say is an error that names file, class and field.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.given_files import read_given_text
from serving.options import ConfigError, option
from serving.service_class import SERVICE_CLASSES, STANDARD, ServiceClass

MOST_CLASSES = 64  # they are values of a label in metrics
DAY_MS = 86_400_000.0
DAY = 86_400.0
NONE = "none"  # in a file: no objective, the router's own patience, any backlog
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Service classes, limits, and the keys that have some of their own."""

    service_classes: str | None = option(
        None,
        "a TOML file with a table for each service class: those named interactive, standard or batch change the fields"
        " given, others are new classes",
    )
    default_service_class: str = option(STANDARD, "class of requests that name none")
    strict_disaggregation: bool = option(
        False, "no worker computes the prompts of its own decodes: a request that finds no such pair fails"
    )
    rate_limit_requests: int | None = option(
        None, "requests a minute for each API key, or for all together where no key is required; default: any", least=1
    )
    rate_limit_tokens: int | None = option(
        None, "tokens of prompts and outputs a minute, likewise; default: any", least=1
    )
    api_keys_file: str | None = option(
        None, "a file of API keys with tenants and limits, as `millrace keys` writes it; read again when it changes"
    )
    key_pepper_file: str | None = option(
        None, "file of the secret that keys in --api-keys-file are hashed with; default: MILLRACE_KEY_PEPPER"
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """A number from `least` to `most`, or where `optional`, NONE."""

    least: float
    most: float
    above: bool = False  # `least` itself is too little
    optional: bool = False
    whole: bool = False

    def read(self, value: object) -> float | int | None:
        """Raises ValueError that says what is asked for."""
        if self.optional and value == NONE:
            return None
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            also = f' or "{NONE}"' if self.optional else ""
            raise ValueError(f"must be a {'whole ' if self.whole else ''}number{also}, not {value!r}")
        if not self.least <= value <= self.most or (self.above and value == self.least):
            low = f"more than {self.least:g}" if self.above else f"at least {self.least:g}"
            raise ValueError(f"must be {low} and at most {self.most:g}, not {value!r}")
        return value if self.whole else float(value)


_OBJECTIVE = _Rule(0.0, DAY_MS, above=True, optional=True)
_RULES: Mapping[str, _Rule] = {
    "ttft_slo_ms": _OBJECTIVE,
    "tpot_slo_ms": _OBJECTIVE,
    "weight": _Rule(0.0, 1e6, above=True),
    "priority": _Rule(-1_000_000, 1_000_000, whole=True),
    "patience": _Rule(0.0, DAY, optional=True),
    "backlog": _Rule(0.0, DAY, optional=True),
}
_SWITCHES = ("shed", "degrade")


def configured_classes(config: ServiceConfig) -> Mapping[str, ServiceClass]:
    """The classes by name, the default one among them. Raises ConfigError."""
    classes = read_service_classes(config.service_classes)
    check_default(config.default_service_class, classes)
    return classes


def read_service_classes(path: str | None) -> Mapping[str, ServiceClass]:
    """The classes by name: the built-in ones, with what the file says of them and beside them. Raises ConfigError."""
    if path is None:
        return SERVICE_CLASSES
    try:
        return parse_service_classes(read_given_text(path), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--service-classes {path}: {error}", param="service_classes") from None


def parse_service_classes(text: str, where: str) -> Mapping[str, ServiceClass]:
    """As read_service_classes; `where` is what errors call the file."""
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}", param="service_classes") from None
    classes = dict(SERVICE_CLASSES)
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            wanted = "letters, digits, dots, underscores and dashes, at most 64"
            raise ConfigError(f"{where}: {name[:80]!r} is no name of a class: {wanted}", param=name)
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be a table of a class's fields, as in [{name}]", param=name)
        classes[name] = _parse_class(classes.get(name) or ServiceClass(name=name), table, where)
    if len(classes) > MOST_CLASSES:
        raise ConfigError(f"{where}: {len(classes)} classes are more than {MOST_CLASSES}", param="service_classes")
    return classes


def _parse_class(known: ServiceClass, table: Mapping[str, Any], where: str) -> ServiceClass:
    fields: dict[str, Any] = {}
    for field, value in table.items():
        here = f"{where}: [{known.name}] {field}"
        if field in _SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(f"{here}: must be true or false, not {value!r}", param=f"{known.name}.{field}")
            fields[field] = value
            continue
        rule = _RULES.get(field)
        if rule is None:
            raise ConfigError(
                f"{here}: unknown; a class has {', '.join((*_RULES, *_SWITCHES))}", param=f"{known.name}.{field}"
            )
        try:
            fields[field] = rule.read(value)
        except ValueError as error:
            raise ConfigError(f"{here}: {error}", param=f"{known.name}.{field}") from None
    if fields.get("degrade"):
        fields.setdefault("shed", False)  # a built-in class that is shed may be told to go on instead
    made = dataclasses.replace(known, **fields)
    if made.shed and made.degrade:
        raise ConfigError(
            f"{where}: [{known.name}] is to shed and to degrade: a request that can meet its objectives nowhere is"
            " either refused or goes on without them",
            param=f"{known.name}.degrade",
        )
    return made


def check_default(name: str, classes: Mapping[str, ServiceClass]) -> str:
    """The name, if it is one of the classes. Raises ConfigError."""
    if name not in classes:
        raise ConfigError(
            f"--default-service-class: {name!r} is none of {', '.join(classes)}", param="default_service_class"
        )
    return name
