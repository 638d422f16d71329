"""Questions small enough for tests: short chats on a few devices, measured in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.planner.answer import PlanAnswer, PlanQuestion
from deploy.planner.attainment import OfferedTraffic
from deploy.planner.candidates import SearchSpace
from deploy.planner.machines import MODELS, Machines
from deploy.planner.placements import InstanceShape
from deploy.planner.probing import ProbeStore, RateProber
from deploy.planner.search import PlanSearch
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass

OPT = MODELS["opt-13b"]


def traffic(prompt: float = 256, output: float = 32, ttft_ms: float = 250, tpot_ms: float = 60) -> Traffic:
    kind = TrafficClass(prompt=Lengths(prompt, 0.4), output=Lengths(output, 0.4), ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    return Traffic(name="test", classes=(kind,))


def load(made: Traffic | None = None, requests: int = 80, **fields: Any) -> OfferedTraffic:
    profile = OPT.profile(Machines(), InstanceShape())
    return OfferedTraffic(traffic=made or traffic(), profile=profile, requests=requests, **fields)


def question(devices: int = 2, **fields: Any) -> PlanQuestion:
    """Workers of one device or two, steps of 512 tokens, no simulator."""
    given = {
        "model": OPT,
        "machines": Machines(devices_per_node=devices),
        "load": load(),
        "space": SearchSpace(tp=(1, 2), budgets=(512,)),
        "estimates": 12,
        "finalists": 0,
    }
    return PlanQuestion(**{**given, **fields})


def answered(asked: PlanQuestion, path: Path | None = None, resume: bool = False) -> tuple[PlanAnswer, ProbeStore]:
    with ProbeStore(path, resume) as store, RateProber(asked.load, asked.goal, asked.seeds, store, 0) as prober:
        return PlanSearch(asked, prober).answer(), store
