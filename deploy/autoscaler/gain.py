"""What share of requests would meet both objectives with other numbers of workers: an estimate, for logs and dry runs.

TTFT by the waiting time of M/G/c queues (Lee and Longton's scaling of Erlang's C), TPOT by the step of the batch that
the offered tokens keep running. No decision depends on it. Pure.
"""

from __future__ import annotations

from math import exp, sqrt

from deploy.autoscaler.demand import RoleNeed, TrafficProfile, WorkerCapacity
from router.chances import LEAST_ERROR, within

VARIATION = 1.0  # of prompts' seconds: their standard deviation by their mean
FULL = 0.98  # load from which on a queue counts as never empty


def predicted_attainment(
    profile: TrafficProfile, capacity: WorkerCapacity, need: RoleNeed, prefill: float, decode: float
) -> float:
    """With so many workers' worth of each role. What is offered beyond what they can do is late."""
    if not profile.rate:
        return 1.0
    return _ttft_met(profile, need.prefill, prefill) * _tpot_met(profile, capacity, need.decode, decode)


def _ttft_met(profile: TrafficProfile, need: float, workers: float) -> float:
    if profile.ttft is None or not need:  # workers hold every prompt already
        return 1.0
    seconds = need / profile.rate  # of a prompt
    left = profile.ttft - seconds
    if left <= 0 or workers <= 0:
        return 0.0
    busy = min(need, FULL * workers)
    servers = max(1, round(workers))
    waits = erlang_c(servers, busy * servers / workers)
    leaving = 2 / (1 + VARIATION**2) * (workers - busy) / seconds  # a second, from the queue
    return (1 - waits * exp(-leaving * left)) * min(1.0, workers / max(need, 1e-9))


def erlang_c(servers: int, offered: float) -> float:
    """The chance that who comes has to wait, of M/M/c with `offered` servers' worth of work, below `servers`."""
    blocked = 1.0  # Erlang's B, from one server on
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)


def _tpot_met(profile: TrafficProfile, capacity: WorkerCapacity, need: float, workers: float) -> float:
    """The batch b that so many tokens a second keep running solves b = tokens · step(b)."""
    if profile.tpot is None:
        return 1.0
    if workers <= 0:
        return 0.0
    cost = capacity.decode
    tokens = need * capacity.tokens / workers  # a second, of one worker
    each = cost.decode_seconds(1, profile.context) - cost.fixed
    left = 1 - tokens * each
    batch = tokens * cost.fixed / left if left > 0 else 2 * capacity.batch
    batch = min(batch, 2 * capacity.batch)
    step = cost.decode_seconds(batch, batch * profile.context)
    error = sqrt(max(cost.error, LEAST_ERROR) ** 2 + (each * sqrt(batch) / step) ** 2)
    return within(profile.tpot, step, error)
