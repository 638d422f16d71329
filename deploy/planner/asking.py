"""Makes a question of a file and of flags, and says what is wrong with them. Flags go before the file.

It reads the question's file and those that it names; it knows neither searches nor output.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bench.lengths import read_pairs
from deploy.planner.answer import PlanQuestion
from deploy.planner.attainment import AttainmentGoal, OfferedTraffic
from deploy.planner.candidates import SearchSpace, usable_shapes
from deploy.planner.machines import AS_PROFILED, MACHINES, MODELS, Machines, PlannedModel, profiled
from deploy.planner.recorded_traffic import RecordedTraffic
from deploy.simulator.profile_files import read_profile
from deploy.simulator.profiles import Profile
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass, traffic_of

TABLES = ("model", "hardware", "traffic", "objectives", "search")
# Flags by the table and key that they go before.
FLAGS: Mapping[str, tuple[str, str]] = {
    "model": ("model", "name"),
    "profile": ("model", "profile"),
    "hardware": ("hardware", "name"),
    "nodes": ("hardware", "nodes"),
    "devices_per_node": ("hardware", "devices_per_node"),
    "cost": ("hardware", "cost"),
    "workload": ("traffic", "workload"),
    "lengths": ("traffic", "lengths"),
    "trace": ("traffic", "trace"),
    "rate": ("traffic", "rate"),
    "burstiness": ("traffic", "burstiness"),
    "ttft_ms": ("objectives", "ttft_ms"),
    "tpot_ms": ("objectives", "tpot_ms"),
    "attainment": ("objectives", "attainment"),
    "attain": ("objectives", "attain"),
    "tp": ("search", "tp"),
    "pp": ("search", "pp"),
    "max_num_batched_tokens": ("search", "max_num_batched_tokens"),
    "links": ("search", "links"),
    "assume": ("search", "assume"),
    "requests": ("search", "requests"),
    "seconds": ("search", "seconds"),
    "seeds": ("search", "seeds"),
    "estimates": ("search", "estimates"),
    "finalists": ("search", "finalists"),
}
KNOWN: Mapping[str, set[str]] = {
    "model": {"name", *(each.name for each in fields(PlannedModel))} - {"measured", "room"},
    "hardware": {each.name for each in fields(Machines)},
    "traffic": {"prompt_mean", "prompt_spread", "output_mean", "output_spread"},
    "objectives": set(),
    "search": set(),
}
REFERENCE_REQUESTS = 300
WHOLE = {"nodes", "devices_per_node", "layers", "heads", "kv_heads", "hidden", "kv_bytes", "max_model_len"}
MOST_FIGURE = 1e24
MOST_SPREAD = 3.0


def read_question(options: argparse.Namespace) -> PlanQuestion:
    """Raises ValueError that names what cannot be, OSError for a file that cannot be read."""
    given = _tables(options.question)
    for flag, (table, key) in FLAGS.items():
        if getattr(options, flag) is not None:
            given[table][key] = getattr(options, flag)
    measured = _profile(given["model"])
    model = profiled(measured) if measured is not None else _model(given["model"])
    machines = _machines(given["hardware"], AS_PROFILED if measured is not None else Machines())
    budgets = (512, 1024, 2048) if measured is None else (measured.max_num_batched_tokens,)
    search = given["search"]
    reference = (
        _one_of(search, "assume", "serving", ("serving", "distserve")) == "distserve"
    )  # its steps have no budget
    space = SearchSpace(
        tp=_whole(search, "tp", (1, 2, 4, 8)),
        pp=_whole(search, "pp", (1,)),
        budgets=(2048,) if reference else _whole(search, "max_num_batched_tokens", budgets),
        free=_one_of(search, "links", "both", ("both", "fast", "slow")) != "slow",
        tied=search.get("links") != "fast",
    )
    objectives = given["objectives"]
    return PlanQuestion(
        model=model,
        machines=machines,
        load=_load(given, model, machines, space, reference),
        goal=AttainmentGoal(
            share=_number(objectives, "attainment", 0.9, most=1.0),
            joint=_one_of(objectives, "attain", "each" if reference else "both", ("both", "each")) == "both",
        ),
        space=space,
        seeds=tuple(range(_count(search, "seeds", 1))),
        estimates=_count(search, "estimates", 40),
        finalists=_count(search, "finalists", 1, least=0),
        least_rate=_number(given["traffic"], "rate", 0.0, least=0),
        reference=reference,
    )


def _tables(path: Path | None) -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
    for name, table in found.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ValueError(f"{path}: {name!r} is none of the tables {', '.join(TABLES)}")
        known = KNOWN[name] | {key for owner, key in FLAGS.values() if owner == name}
        for key in table:
            if key not in known:
                raise ValueError(f"{path}: [{name}] has no {key!r}, but {', '.join(sorted(known))}")
    return {name: dict(found.get(name, {})) for name in TABLES}


def _profile(table: dict[str, Any]) -> Profile | None:
    """Of a worker, where the table names its file. Raises ValueError, OSError."""
    if "profile" not in table:
        return None
    if others := ", ".join(sorted(table.keys() - {"profile"})):
        raise ValueError(f"profile goes without {others}: the profile is of one model, and names it")
    return read_profile(Path(_text(table, "profile", "")))


def _model(table: dict[str, Any]) -> PlannedModel:
    """A known one, with figures of the table's own; all of them for another."""
    name = _text(table, "name", "opt-13b")
    own = _figures("model", table)
    if name in MODELS:
        # Figures that differ from the known model's make another, whose steps nobody has measured.
        return replace(MODELS[name], **own, measured={}) if own else MODELS[name]
    try:
        return PlannedModel(name=name, **own)
    except TypeError:
        needed = [each.name for each in fields(PlannedModel)][1:7]
        known = ", ".join(MODELS)
        raise ValueError(
            f"model {name!r} is none of {known}: [model] of a file gives its {', '.join(needed)}"
        ) from None


def _machines(table: dict[str, Any], otherwise: Machines) -> Machines:
    name = _text(table, "name", otherwise.name)
    if name == otherwise.name:
        return replace(otherwise, **_figures("hardware", table))
    if name not in MACHINES and not {"memory", "flops", "memory_bandwidth"} <= set(table):
        raise ValueError(
            f"hardware {name!r} is none of {', '.join(MACHINES)}: [hardware] of a file gives its memory, flops and"
            " memory_bandwidth"
        )
    return replace(MACHINES.get(name, Machines(name=name)), **_figures("hardware", table))


def _load(
    given: Mapping[str, dict[str, Any]], model: PlannedModel, machines: Machines, space: SearchSpace, reference: bool
) -> OfferedTraffic:
    """Objectives left out are multiples of what the smallest worker takes alone."""
    shapes, rejected = usable_shapes(model, machines, space)
    if not shapes:
        raise ValueError("no worker fits: " + "; ".join(f"{each.what}: {each.reason}" for each in rejected))
    table, search = given["traffic"], given["search"]
    ttft, tpot = (_number(given["objectives"], name, None) for name in ("ttft_ms", "tpot_ms"))
    if "trace" in table:
        recorded = _recorded(table, objectives=ttft is None or tpot is None)
        traffic, pairs = recorded.traffic, recorded.pairs
    else:
        traffic = _traffic(table, model.max_model_len)
        pairs = tuple(read_pairs(Path(_text(table, "lengths", "")))) if "lengths" in table else ()
    traffic = traffic.with_objectives(ttft, tpot)
    return OfferedTraffic(
        traffic=replace(traffic, burstiness=_number(table, "burstiness", traffic.burstiness)),
        profile=model.profile(machines, shapes[0]),
        requests=_count(search, "requests", REFERENCE_REQUESTS if reference else 600, least=20),
        seconds=_number(search, "seconds", 0.0 if reference else 60.0, least=0),
        pairs=pairs,
    )


def _recorded(table: Mapping[str, Any], *, objectives: bool) -> RecordedTraffic:
    """Of the table's trace, beside which it says nothing of lengths. Raises ValueError, OSError."""
    others = sorted(table.keys() - {"trace", "rate", "burstiness"})
    if others:
        raise ValueError(f"trace goes without {', '.join(others)}: the trace says how long requests are")
    return RecordedTraffic.read(Path(_text(table, "trace", "")), objectives=objectives)


def _traffic(table: Mapping[str, Any], longest: int) -> Traffic:
    """A known workload, or lengths of the table's own. Pairs of a file need a workload of one class."""
    if "prompt_mean" in table or "output_mean" in table:
        prompt, output = (
            Lengths(
                _number(table, f"{which}_mean", mean, least=1, most=longest),
                _number(table, f"{which}_spread", 0.0, least=0, most=MOST_SPREAD),
                most=longest,
            )
            for which, mean in (("prompt", 512), ("output", 64))
        )
        if prompt.mean + output.mean > longest:
            raise ValueError(
                f"prompt-mean {prompt.mean:g} and output-mean {output.mean:g} are more than the model's {longest}"
            )
        return Traffic(name="own", classes=(TrafficClass(prompt=prompt, output=output),))
    traffic = traffic_of(_text(table, "workload", "sharegpt"))
    if "lengths" in table and len(traffic.classes) > 1:
        raise ValueError(f"lengths go with a workload of one class, which {traffic.name} is not")
    return traffic


def _number(table: Mapping[str, Any], key: str, default: Any, least: float | None = None, most: float = 1e12) -> Any:
    value = table.get(key, default)
    if value is None:
        return None
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not (value > 0 if least is None else value >= least) or value > most:
        bounds = "above 0" if least is None else f"from {least:g} on"
        raise ValueError(f"{key.replace('_', '-')} {value!r} is not a number {bounds}, {most:g} at most")
    return value


def _count(table: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = _number(table, key, default, least=least, most=1e6)
    if value != int(value):
        raise ValueError(f"{key.replace('_', '-')} {value!r} is not a whole number")
    return int(value)


def _text(table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{key} {value!r} is no text of one line")
    return value


def _figures(owner: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """All but the name: sizes and speeds, of which some are whole numbers."""
    found = {key: value for key, value in table.items() if key != "name"}
    for key, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_FIGURE
        if not number or (key in WHOLE and value != int(value)):
            kind = "a whole number" if key in WHOLE else "a number"
            raise ValueError(f"{key.replace('_', ' ')} of the {owner} must be {kind} above 0, not {value!r}")
    return {key: int(value) if key in WHOLE else value for key, value in found.items()}


def _whole(table: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = table.get(key, default)
    try:
        found = tuple(int(part) for part in value.split(",")) if isinstance(value, str) else tuple(value)
    except (ValueError, TypeError):
        found = ()
    if not found or any(type(part) is not int or part < 1 for part in found):
        raise ValueError(f"{key.replace('_', '-')} {value!r}: give whole numbers above 0, as in 1,2,4")
    return found


def _one_of(table: Mapping[str, Any], key: str, default: str, known: tuple[str, ...]) -> str:
    value = table.get(key, default)
    if value not in known:
        raise ValueError(f"{key} {value!r} is none of {', '.join(known)}")
    return str(value)
