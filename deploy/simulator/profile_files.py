"""Reads profiles from files: what a live worker has learned of its steps, or a description of hardware and model.

A JSON file is what `millrace profile` writes. A TOML file has the tables `[model]` and `[hardware]`, with the fields of
ModelShape and Hardware.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson

from deploy.simulator.hardware import Hardware, ModelShape, roofline_profile
from deploy.simulator.profiles import Fitted, Profile
from serving.step_cost import StepCost

T = TypeVar("T")

MOST = 1e24  # of any figure

COST = ("fixed", "token", "pair", "sequence", "context", "error")  # seconds, of StepCost; `error` of a logarithm
SIZES = ("kv_tokens", "kv_bytes", "layers", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


def read_profile(path: Path) -> Profile:
    """Raises ValueError that names file and field, OSError."""
    text = path.read_bytes()
    try:
        known = orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text.decode())
    except (orjson.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(known, dict):
        raise ValueError(f"{path}: not an object")
    return fitted_profile(path, known) if path.suffix == ".json" else described_profile(path, known)


def fitted_profile(path: Path, known: Mapping[str, Any]) -> Profile:
    """A worker's own fit. Raises ValueError."""
    cost = known.get("cost")
    if not isinstance(cost, dict) or not isinstance(known.get("model"), str):
        raise ValueError(f"{path}: gives no model and cost, as `millrace profile` writes them")
    values: dict[str, Any] = {name: _positive(path, f"cost.{name}", cost.get(name), least=0.0) for name in COST}
    if not any(values[name] for name in COST if name != "error"):
        raise ValueError(f"{path}, cost: a step that takes no time is none")
    sizes: dict[str, Any] = {name: _whole(path, name, known.get(name)) for name in SIZES}
    return Profile(name=path.stem, model=known["model"], steps=Fitted(StepCost(**values)), **sizes)


def described_profile(path: Path, known: Mapping[str, Any]) -> Profile:
    """A roofline of what the tables say. Raises ValueError."""
    for name in known.keys() ^ {"model", "hardware"}:
        raise ValueError(f"{path}, {name}: a description has the tables [model] and [hardware]")
    model, hardware = (
        _table(path, name, known[name], kind) for name, kind in (("model", ModelShape), ("hardware", Hardware))
    )
    assert isinstance(model, ModelShape) and isinstance(hardware, Hardware)
    try:
        return roofline_profile(path.stem, model, hardware)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _table(path: Path, table: str, given: Mapping[str, Any], kind: type[T]) -> T:
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(given, dict):
        raise ValueError(f"{path}, {table}: not a table")
    for name in given.keys() - fields.keys():
        raise ValueError(f"{path}, {table}.{name}: there are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise ValueError(f"{path}, {table}.{missing[0]}: missing")
    read: dict[object, Callable[[Path, str, object], object]] = {"str": _text, "int": _whole}
    return kind(
        **{
            name: read.get(fields[name].type, _positive)(path, f"{table}.{name}", value)
            for name, value in given.items()
        }
    )


def _text(path: Path, name: str, value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{path}, {name}: {value!r} is no text of one line")
    return value


def _whole(path: Path, name: str, value: object) -> int:
    number = _positive(path, name, value)
    if number != int(number):
        raise ValueError(f"{path}, {name}: {value!r} is not a whole number above 0")
    return int(number)


def _positive(path: Path, name: str, value: object, least: float = 1e-12) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= MOST:
        raise ValueError(f"{path}, {name}: {value!r} is not a number {'from 0 on' if least == 0.0 else 'above 0'}")
    return float(value)
