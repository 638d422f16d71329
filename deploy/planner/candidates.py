"""All placements of a model on machines, and why the others are none: memory, divisors, nodes.

Pure. Both of DistServe's searches (its sections 4.1 and 4.2) and workers that do both, from one list of shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.planner.machines import GIB, Machines, PlannedModel
from deploy.planner.placements import (
    CandidatePlacement,
    InstanceShape,
    Rejection,
    aggregated,
    disaggregated,
)
from deploy.simulator.hardware import USABLE_MEMORY


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What may be chosen. `free` links let KV go from any worker to any; `tied` ones keep it inside a node."""

    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1,)
    budgets: tuple[int, ...] = (512, 1024, 2048)
    free: bool = True
    tied: bool = True
    mixed: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "budgets"):
            given = getattr(self, name)
            if not given or min(given) < 1:
                raise ValueError(f"{name}: give whole numbers above 0")


def usable_shapes(
    model: PlannedModel, machines: Machines, space: SearchSpace
) -> tuple[list[InstanceShape], list[Rejection]]:
    """The shapes that a worker may have, and the others with the reason."""
    found, rejected = [], []
    for shape in (InstanceShape(tp, pp) for tp in sorted(set(space.tp)) for pp in sorted(set(space.pp))):
        reason = why_not(model, machines, shape)
        if reason is None:
            found.append(shape)
        else:
            rejected.append(Rejection(f"workers of {shape}", reason))
    return found, rejected


def why_not(model: PlannedModel, machines: Machines, shape: InstanceShape) -> str | None:
    """Why there can be no worker of this shape; None where there can."""
    if model.room and shape.devices > 1:
        return "the worker that was profiled has one device"
    if model.heads % shape.tp:
        return f"{shape.tp} is no divisor of {model.heads} heads"
    if model.layers % shape.pp:
        return f"{shape.pp} is no divisor of {model.layers} layers"
    if shape.tp > machines.devices_per_node:
        return f"TP across nodes: a node has {machines.devices_per_node} devices"
    if shape.devices > machines.devices:
        return f"{shape.devices} devices of {machines.devices}"
    if model.kv_tokens(machines, shape) < model.max_model_len:
        room = USABLE_MEMORY * machines.memory * shape.devices / GIB
        kv = model.max_model_len * model.kv_bytes
        return (
            f"does not fit memory: weights of {model.weights / GIB:.0f} GiB and the KV of one request of"
            f" {model.max_model_len} tokens, {kv / GIB:.1f} GiB, in {room:.0f} GiB"
        )
    tables = model.tables(machines)
    if tables and shape.tp not in tables:
        return f"there are no step times of TP {shape.tp}, but of {', '.join(map(str, sorted(tables)))}"
    return None


def placements(
    model: PlannedModel, machines: Machines, space: SearchSpace, shapes: Sequence[InstanceShape]
) -> Iterator[CandidatePlacement]:
    """Each once: workers that do both, split ones over free links, and split ones inside nodes."""
    if space.mixed:
        for shape in shapes:
            for count in range(1, machines.devices // shape.devices + 1):
                for budget in space.budgets:
                    yield aggregated(shape, count, budget)
    one_node = machines.nodes == 1
    if space.free or one_node:
        yield from _free(machines, shapes, max(space.budgets))
    if space.tied and not one_node:
        yield from _tied(model, machines, shapes, max(space.budgets))


def _free(machines: Machines, shapes: Sequence[InstanceShape], budget: int) -> Iterator[CandidatePlacement]:
    """DistServe's search for fast links: phases of any shape, in any numbers."""
    for prefill in shapes:
        for decode in shapes:
            for prefills in range(1, (machines.devices - decode.devices) // prefill.devices + 1):
                left = machines.devices - prefills * prefill.devices
                for decodes in range(1, left // decode.devices + 1):
                    yield disaggregated(prefill, prefills, decode, decodes, budget)


def _tied(
    model: PlannedModel, machines: Machines, shapes: Sequence[InstanceShape], budget: int
) -> Iterator[CandidatePlacement]:
    """Its search for slow ones: units, each with the same stages of both phases on every node that it spans.

    A unit over `cross` nodes has pipelines of which each node holds one segment, so that KV stays inside the node.
    """
    for cross in (count for count in range(1, machines.nodes + 1) if model.layers % count == 0):
        for prefill in shapes:
            for decode in shapes:
                if prefill.pp % cross or decode.pp % cross:
                    continue
                yield from _units(machines, prefill, decode, cross, budget)


def _units(
    machines: Machines, prefill: InstanceShape, decode: InstanceShape, cross: int, budget: int
) -> Iterator[CandidatePlacement]:
    node, here, there = machines.devices_per_node, prefill.devices // cross, decode.devices // cross
    for prefills in range(1, (node - there) // here + 1):
        for decodes in range(1, (node - prefills * here) // there + 1):
            if cross > 1 and (prefills, decodes) != (1, 1):
                continue
            most = (machines.nodes // cross) * (node // (prefills * here + decodes * there))
            for units in range(1, most + 1):
                yield disaggregated(prefill, prefills, decode, decodes, budget, units)


def packs(placement: CandidatePlacement, machines: Machines) -> bool:
    """True if every stage finds a node with room for all of its devices. Largest first, each where least is left."""
    if placement.units > 1:
        return True  # units are made to fit nodes
    free = [machines.devices_per_node] * machines.nodes
    stages = sorted((shape.tp for shape in placement.shapes for _ in range(shape.pp)), reverse=True)
    for size in stages:
        room = [index for index, left in enumerate(free) if left >= size]
        if not room:
            return False
        free[min(room, key=lambda index: free[index])] -= size
    return True
