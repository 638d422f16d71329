"""The placement file of a plan, as docs/placement.md has it, and its ranking for programs: pure, from a plan to a text.

The file has roles, numbers, parallel sizes and step budgets; what else a service needs is added by hand.
"""

from __future__ import annotations

import json

import orjson

from deploy.planner.answer import PlanAnswer, PlannedPlacement
from deploy.planner.drawn import verdict
from deploy.planner.machines import AS_PROFILED, Machines
from deploy.planner.placements import InstanceGroup
from serving.messages import Role


def placement_file(planned: PlannedPlacement, model: str, machines: Machines) -> str:
    """TOML that `millrace serve --placement`, `millrace deploy render` and `serve --on ray` take."""
    placement = planned.placement
    lines = [
        f"# {placement}: {planned.goodput:.3g} requests/s, {planned.per_device:.3g} of each device ({planned.source}).",
        f'# Planned for {machines.devices} devices of {machines.name}. Written by "millrace plan".',
        f"model = {json.dumps(model, ensure_ascii=False)}",  # of one printable line, which is the same in TOML
        "",
        *([] if machines.name == AS_PROFILED.name else ["[common]", 'device = "cuda"', ""]),
        "[router]",
        'routing_policy = "goodput"',
    ]
    for group in placement.groups:
        lines += ["", *_group(group, placement.units)]
    lines += ["", "[ray]", f"sets = {placement.units}", 'strategy = "PACK"']
    return "\n".join(lines) + "\n"


def answer_json(answer: PlanAnswer) -> bytes:
    """Verdict, ratio and ranking as JSON: requests a second in all and of a device, seconds of TTFT and TPOT."""
    ranked = [
        {
            "placement": str(each.placement),
            "split": each.placement.split,
            "workers": {str(group.role): group.count * each.placement.units for group in each.placement.groups},
            "devices": each.placement.devices,
            "goodput": each.goodput,
            "per_device": each.per_device,
            "source": each.source,
            "ttft_p90": None if each.figures.at_best is None else each.figures.at_best.ttft_p90,
            "tpot_p90": None if each.figures.at_best is None else each.figures.at_best.tpot_p90,
        }
        for each in answer.ranked
    ]
    told = {"verdict": verdict(answer), "ratio": answer.ratio, "ranked": ranked}
    return orjson.dumps(told, option=orjson.OPT_INDENT_2)


def _group(group: InstanceGroup, units: int) -> list[str]:
    lines = ["[[workers]]", f'role = "{group.role}"', f"count = {group.count * units}"]
    if group.shape.tp > 1:
        lines.append(f"tensor_parallel_size = {group.shape.tp}")
    if group.shape.pp > 1:
        lines.append(f"pipeline_parallel_size = {group.shape.pp}")
    if group.role != Role.DECODE and group.budget:
        lines.append(f"max_num_batched_tokens = {group.budget}")
    return lines
