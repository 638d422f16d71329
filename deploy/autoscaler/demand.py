"""How many workers' time the offered work takes, by what workers have learned of their steps; and how busy they were.

    prefill   seconds of prompts that come a second: fixed·T/budget + token·T + pair·P + sequence·n + context·R
    decode    output tokens a second / those of a worker with the largest batch that keeps TPOT

with n prompts of T tokens and P pairs, less what workers hold already, which read R tokens of context. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from deploy.autoscaler.observation import MetricsMissing, Observation, WorkerSeen
from router.offered import OfferedWork
from router.predict import typical
from serving.messages import Role
from serving.step_cost import StepCost

BUDGET = 512  # prompt tokens of a step, where a worker does not say
RARE = 0.05  # of the requests: a class with a tighter TPOT that comes no more often does not set the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficProfile:
    """What requests have been like over some time: rates a second, means in tokens, objectives in seconds.

    `context` is the mean context that an output token is decoded with. None: no such objective; no answer yet.
    """

    rate: float
    prompt: float
    cached: float  # share of prompt tokens that workers held
    output: float | None
    context: float
    ttft: float | None
    tpot: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCapacity:
    """What one worker of either role gives: the costs of its steps, and the largest batch that keeps TPOT.

    `tokens` a second are those of that batch.
    """

    prefill: StepCost
    decode: StepCost
    budget: int
    batch: float
    tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleNeed:
    """Workers' time a second, of each role, that the offered work takes."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, self.prefill + self.decode)


def traffic_profile(seen: Observation) -> TrafficProfile:
    """Over an interval, usually several observations merged."""
    work = seen.offered
    return TrafficProfile(
        rate=work.arrived / seen.seconds,
        prompt=work.prompt_tokens / work.arrived if work.arrived else 0.0,
        cached=work.cached_tokens / work.answered_prompt_tokens if work.answered_prompt_tokens else 0.0,
        output=work.output_tokens / work.answered if work.answered else None,
        context=_context(work),
        ttft=work.ttft_seconds / work.with_ttft if work.with_ttft else None,
        tpot=_tightest_tpot(seen.work),
    )


def _context(work: OfferedWork) -> float:
    """Until an answer has ended, a token's context is taken for the prompt's length."""
    if work.output_tokens:
        return work.decoded_context / work.output_tokens
    return work.prompt_tokens / work.arrived if work.arrived else 0.0


def _tightest_tpot(classes: Mapping[str, OfferedWork]) -> float | None:
    """A batch is shared by classes, so the tightest of those that are not rare sets how large it may be. Seconds."""
    most = RARE * sum(work.arrived for work in classes.values())
    found = [work.tpot_seconds / work.with_tpot for work in classes.values() if work.with_tpot > most]
    return min(found, default=None)


def worker_capacity(workers: Sequence[WorkerSeen], profile: TrafficProfile) -> WorkerCapacity:
    """Of a typical worker. Raises MetricsMissing where no worker has measured its steps."""
    measured = [worker for worker in workers if worker.cost is not None]
    if not measured:
        raise MetricsMissing("no worker has measured a step yet")
    decoding = [worker for worker in measured if worker.role is not Role.PREFILL] or measured
    decode = _cost(measured, Role.DECODE)
    batch = largest_batch(decode, profile, decoding)
    return WorkerCapacity(
        prefill=_cost(measured, Role.PREFILL),
        decode=decode,
        budget=max(1, round(median(worker.max_batched_tokens or BUDGET for worker in measured))),
        batch=batch,
        tokens=batch / decode.decode_seconds(batch, batch * profile.context),
    )


def _cost(workers: Sequence[WorkerSeen], role: Role) -> StepCost:
    """Of those with the role, else of mixed ones, else of any."""
    for wanted in ({role}, {Role.MIXED}, set(Role)):
        costs = [worker.cost for worker in workers if worker.role in wanted and worker.cost is not None]
        if costs:
            return costs[0] if len(costs) == 1 else typical(costs)
    raise MetricsMissing("no worker has measured a step yet")


def largest_batch(cost: StepCost, profile: TrafficProfile, workers: Sequence[WorkerSeen]) -> float:
    """Sequences of a decode step that keep TPOT, hold a lease, and whose KV fits. At least 1.

    Solves fixed + (token + sequence)·b + (pair + context)·c·b = TPOT for b.
    """
    each = cost.token + cost.sequence + (cost.pair + cost.context) * profile.context
    by_tpot = (profile.tpot - cost.fixed) / each if profile.tpot is not None and each > 0 else inf
    by_room = median(worker.kv_tokens for worker in workers) / profile.context if profile.context else inf
    return max(1.0, min(by_tpot, by_room, median(worker.max_seqs for worker in workers)))


def role_need(seen: Observation, profile: TrafficProfile, capacity: WorkerCapacity) -> RoleNeed:
    """What was offered in `seen`, with lengths of outputs as in `profile`: those of what has just come are not known.

    Decode workers need no less than for what they were seen to serve.
    """
    work, cost = seen.offered, capacity.prefill
    uncached = 1.0 - profile.cached
    tokens = uncached * work.prompt_tokens
    steps = tokens / capacity.budget
    read = (tokens + steps * profile.prompt) / 2  # Σ over steps of the context at their end
    prefill = (
        cost.fixed * steps
        + cost.token * tokens
        + cost.pair * uncached * work.prompt_pairs
        + cost.sequence * max(work.arrived, steps)
        + cost.context * read
    )
    offered = work.arrived * profile.output if profile.output is not None else 0.0
    return RoleNeed(
        prefill=prefill / seen.seconds,
        decode=max(offered, float(seen.tokens)) / seen.seconds / capacity.tokens,
    )


def measured_use(seen: Observation, capacity: WorkerCapacity) -> RoleNeed:
    """How much of the workers of each role was in use, in workers: time in steps; batch or KV, whichever is more.

    KV of leases that wait for their prompts says nothing of decoding, and is left out. Where a mixed worker's time
    goes cannot be told apart.
    """
    live = [worker for worker in seen.workers if worker.state == "live"]
    prefill = sum(worker.busy or 0.0 for worker in live if worker.role is Role.PREFILL)
    decode = sum(_decode_use(worker, capacity) for worker in live if worker.role is not Role.PREFILL)
    return RoleNeed(prefill=prefill, decode=decode)


def _decode_use(worker: WorkerSeen, capacity: WorkerCapacity) -> float:
    kv = worker.kv_usage * min(1.0, worker.running / max(1, worker.leases))
    return min(1.0, max(worker.running / capacity.batch, kv))
