"""Rates that workers cannot exceed, without any queue: what they compute in a second, and what they hold.

Pure arithmetic. A phase that misses its objective even alone is left out, and other searches begin below the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deploy.planner.attainment import AttainmentGoal, OfferedRequests
from deploy.planner.costs import StageCosts
from deploy.planner.placements import InstanceGroup
from deploy.simulator.profiles import Profile, StepWork
from serving.messages import Role

MOST_SEQUENCES = 4096


@dataclass(frozen=True, slots=True)
class PhaseBounds:
    """Requests a second of one worker at most, for prompts and for decode steps; 0 where it misses them idle."""

    prefill: float
    decode: float


def phase_bounds(profile: Profile, stages: int, requests: OfferedRequests, goal: AttainmentGoal) -> PhaseBounds:
    """What a worker could do with the phase alone.

    Prompts: a step of them all costs its tokens alone, so the worker is full when those fill its time. Decode steps:
    the batch within the loosest TPOT and the KV's room, over the steps that a request takes.
    """
    costs = StageCosts(profile, stages)
    return PhaseBounds(_prefill(costs, requests, goal), _decode(costs, profile, stages, requests))


def _prefill(costs: StageCosts, requests: OfferedRequests, goal: AttainmentGoal) -> float:
    seconds, alone = [], []
    for prompt in requests.prompt:
        work = StepWork()
        work.add_prompt(0, prompt)
        stage, latency = costs.seconds(work)
        alone.append(latency)
        seconds.append(stage - _empty(costs))
    met = float((np.array(alone) <= np.array(requests.ttft)).mean())
    return 1.0 / float(np.mean(seconds)) if met >= goal.share else 0.0


def _empty(costs: StageCosts) -> float:
    """A step of one token, of which a step of many prompts needs but one."""
    work = StepWork()
    work.add_prompt(0, 1)
    return costs.seconds(work)[0]


def _decode(costs: StageCosts, profile: Profile, stages: int, requests: OfferedRequests) -> float:
    context = float(np.mean(requests.prompt)) + float(np.mean(requests.output)) / 2
    limit = max(requests.tpot)
    most = min(MOST_SEQUENCES, int(profile.kv_tokens / stages // context))
    low, high = 0, most
    while low < high:  # the largest batch within the limit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _step(costs, middle, context) <= limit else (low, middle - 1)
    if not low:
        return 0.0
    return stages * low / _step(costs, low, context) / max(float(np.mean(requests.output)) - 1, 1)


def _step(costs: StageCosts, sequences: int, context: float) -> float:
    return costs.seconds(StepWork(decoding=sequences, decoding_context=int(sequences * context)))[1]


def group_bound(group: InstanceGroup, bounds: PhaseBounds) -> float:
    """Requests a second of all its workers at most. One that does both has a share of its time for each."""
    if group.role == Role.PREFILL:
        return group.count * bounds.prefill
    if group.role == Role.DECODE:
        return group.count * bounds.decode
    if not bounds.prefill or not bounds.decode:
        return 0.0
    return group.count / (1 / bounds.prefill + 1 / bounds.decode)
