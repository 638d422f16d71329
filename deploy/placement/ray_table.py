"""The `[ray]` table of a placement file: how a Ray cluster places the groups, and what each of their services reserves.

Pure: a table in, plain values or an error out. Ray itself is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.options import ConfigError, parse_bytes

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
Fault = Callable[[tuple[str | int, ...], str], ConfigError]
"""An error that names the place in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayReservation:
    """What one service of a group reserves on a node. None follows from the group's settings."""

    cpus: int | None = None  # whole cores, since they are the worker's threads
    gpus: float | None = None
    memory: int | None = None  # bytes
    resources: Mapping[str, float] = field(default_factory=dict)  # the cluster's own, by their names


@dataclass(frozen=True, kw_only=True, slots=True)
class RayTable:
    """How a deployment lies on a Ray cluster: `sets` placement groups, with services of every group in each."""

    name: str = "millrace"
    strategy: str = "PACK"
    sets: int = 1
    groups: Mapping[str, RayReservation] = field(default_factory=dict)


def read_ray_table(table: Mapping[str, Any], groups: Sequence[str], fault: Fault) -> RayTable:
    """What `[ray]` and its tables of groups (`[ray.prefill]`) mean. Raises ConfigError."""
    found: dict[str, Any] = {"groups": {}}
    for key, value in table.items():
        if key in groups and isinstance(value, dict):
            found["groups"][key] = _reservation(key, value, fault)
        elif key in CHECKS:
            told = CHECKS[key](value)
            if told is not None:
                raise fault(("ray", key), f"{key} = {value!r} {told}")
            found[key] = value
        else:
            known = [*CHECKS, *(f"[ray.{group}]" for group in groups)]
            raise fault(("ray", key), f"unknown key {key!r}; known are {', '.join(known)}")
    return RayTable(**found)


def _reservation(group: str, table: Mapping[str, Any], fault: Fault) -> RayReservation:
    found: dict[str, Any] = {}
    for key, value in table.items():
        where = ("ray", group, key)
        if key == "cpus" and isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            found[key] = value
        elif key == "gpus" and _is_amount(value):
            found[key] = float(value)
        elif key == "memory" and isinstance(value, str):
            found[key] = _bytes(value, where, fault)
        elif key == "resources" and isinstance(value, dict) and all(map(_is_amount, value.values())):
            found[key] = {name: float(amount) for name, amount in value.items()}
        elif key in FORMS:
            raise fault(where, f"{key} = {value!r} is not {FORMS[key]}")
        else:
            raise fault(where, f"unknown key {key!r}; known are {', '.join(FORMS)}")
    return RayReservation(**found)


FORMS = {
    "cpus": "a whole number of cores from 1",
    "gpus": "a number from 0",
    "memory": 'a size such as "8GiB"',
    "resources": "a table of the cluster's own resources, such as { a100 = 1 }",
}


def _name(value: Any) -> str | None:
    fits = isinstance(value, str) and NAME.fullmatch(value) is not None
    return None if fits else "is no name: small letters, digits and dashes, at most 63"


def _strategy(value: Any) -> str | None:
    return None if value in STRATEGIES else f"is none of {', '.join(STRATEGIES)}"


def _sets(value: Any) -> str | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return None if fits else "is not a number from 1"


CHECKS: Mapping[str, Callable[[Any], str | None]] = {"name": _name, "strategy": _strategy, "sets": _sets}


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _bytes(value: str, where: tuple[str, ...], fault: Fault) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise fault(where, str(error)) from None
