"""What the goodput table compares: fleets of as many workers, policies, budgets of a step, and things switched off.

Pure: it makes studies of simulated clusters and plays none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.simulator.ablation import without
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.drafts import DraftModel
from deploy.simulator.profiles import Profile, StepWork
from deploy.simulator.study import Study
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass, traffic_of
from serving.messages import Role

WORKLOADS = ("chat", "long-mixed", "shared-prefix")
FLEETS = ("auto", "mixed", "split")
POLICIES = ("goodput", "round_robin", "least_loaded")
BUDGETS = (256, 512, 1024, 2048)  # tokens of a step, fixed
BUDGETS_FOR = "long-mixed"
SWITCHED_OFF = {  # where it can matter; without the score it is least_loaded, and nothing is drafted unless asked for
    "long-mixed": ("order", "chunk", "bound", "shedding"),
    "shared-prefix": ("affinity",),
}
DRAFTS = 0.5  # share of drafted tokens that are right, where there are any
BUSY_PROMPTS = 0.85  # share of a prefill worker's time, at which prompts still come within their TTFT
STEP_SHARE = 0.85  # of the TPOT objective, that a decode step may take
MIXED_SHARE = 1 / 3  # of `auto` workers; the others prefill or decode


@dataclass(frozen=True, slots=True)
class TableRow:
    """One thing whose goodput is looked for: `what` is a policy, or the goodput policy with something else about it."""

    workload: str
    fleet: str
    what: str
    study: Study

    @property
    def name(self) -> str:
        return f"{self.workload} {self.fleet} {self.what}"


def table_rows(profile: Profile, workers: int, workloads: Sequence[str], requests: int, seeds: int) -> list[TableRow]:
    """All rows, those that matter most first."""
    rows: list[TableRow] = []
    for workload in workloads:
        study = Study(
            plan=ClusterPlan.of(profile, (), "goodput"),
            traffic=traffic_of(workload),
            requests=requests,
            seeds=tuple(range(seeds)),
        )
        rows += [TableRow(workload, *row) for row in _rows(study, workers)]
    return sorted(rows, key=_importance)


def _importance(row: TableRow) -> int:
    """Smaller is sooner: the policies where all kinds of workers are at hand, then what they are held against."""
    if row.what in POLICIES:
        return 0 if row.what == "goodput" or row.fleet == "auto" else 2
    return 1 if row.what.startswith("fixed") else 3


def _rows(study: Study, workers: int) -> Iterator[tuple[str, str, Study]]:
    """Fleet, what, and its study."""
    fleets = fleets_for(study.traffic, study.plan.profile, workers)
    whole = {fleet: replace(study, plan=replace(study.plan, roles=roles)) for fleet, roles in fleets.items()}
    for fleet, each in whole.items():
        for policy in POLICIES:
            yield fleet, policy, replace(each, plan=_routed(each.plan, policy))
    if study.traffic.name == BUDGETS_FOR:
        for budget in BUDGETS:
            engine = replace(study.plan.engine, chunking="fixed", max_num_batched_tokens=budget)
            yield "mixed", f"fixed {budget}", replace(study, plan=replace(whole["mixed"].plan, engine=engine))
    auto = whole["auto"].plan
    for name in SWITCHED_OFF.get(study.traffic.name, ()):
        yield "auto", f"no {name}", replace(study, plan=without(auto, name))
    if study.traffic.name == BUDGETS_FOR:
        yield "auto", "with drafts", replace(study, plan=auto.with_drafts(DraftModel(right=DRAFTS)))


def _routed(plan: ClusterPlan, policy: str) -> ClusterPlan:
    return replace(plan, router=replace(plan.router, policy=policy))


# ---- how many workers of each role -----------------------------------------------------------------------------------


def fleets_for(traffic: Traffic, profile: Profile, workers: int) -> dict[str, tuple[Role, ...]]:
    """The roles of each kind of fleet: split ones in the numbers that the load asks for, a third of `auto` mixed."""
    if workers < 3:
        raise ValueError(f"--workers {workers}: give at least 3, one of each role")
    mixed = min(workers - 2, max(1, round(MIXED_SHARE * workers)))
    return {
        "auto": (Role.MIXED,) * mixed + _split(traffic, profile, workers - mixed),
        "mixed": (Role.MIXED,) * workers,
        "split": _split(traffic, profile, workers),
    }


def _split(traffic: Traffic, profile: Profile, workers: int) -> tuple[Role, ...]:
    """Workers that compute prompts and workers that decode, by what a request takes of each."""
    prompts, decodes = seconds_each(traffic, profile)
    prefill = min(workers - 1, max(1, round(workers * prompts / (prompts + decodes))))
    return (Role.PREFILL,) * prefill + (Role.DECODE,) * (workers - prefill)


def seconds_each(traffic: Traffic, profile: Profile) -> tuple[float, float]:
    """Of a prefill worker's time, and of a decode worker's, for one request: about what the objectives leave."""
    prompts = sum(kind.share * _prompt_seconds(kind, profile) for kind in traffic.classes) / BUSY_PROMPTS
    return prompts, sum(kind.share * _decode_seconds(kind, profile) for kind in traffic.classes)


def _prompt_seconds(kind: TrafficClass, profile: Profile) -> float:
    """Of a prefill worker's time, for a prompt of the mean length in full steps, its shared prefix cached."""
    work, most = StepWork(), profile.max_num_batched_tokens
    work.add_prompt(int(max(kind.prefix_tokens, _lengths(kind.prompt).mean / 2)), most)
    return profile.seconds(work) * (_lengths(kind.prompt).mean - kind.prefix_tokens) / most


def _decode_seconds(kind: TrafficClass, profile: Profile) -> float:
    """Of a decode worker's time, for all tokens of an output in as large a batch as its TPOT and the KV allow."""
    output = _lengths(kind.output).mean
    context = int(_lengths(kind.prompt).mean + output / 2)
    limit = STEP_SHARE * (kind.objectives(profile).tpot_ms or 1e9) / 1e3
    fitting = min(profile.max_num_seqs, profile.kv_tokens // context)
    batches = [rows for rows in range(1, fitting + 1) if profile.decode_seconds(rows, context) <= limit]
    rows = max(batches, default=1)
    return profile.decode_seconds(rows, context) / rows * output


def _lengths(given: Lengths | None) -> Lengths:
    if given is None:
        raise ValueError("the goodput table needs workloads whose lengths have means")
    return given
