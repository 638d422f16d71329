"""What a placement would bring: seconds to the first token, seconds a token after it, and what it does to others.

Pure arithmetic over candidates; the formulas of queueing are those of a single server that is never idle while it
has work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import median

from router.calibration import Drift
from router.candidate import AGE, STEP, UNHURRIED, Candidate, QueuedPrompt
from router.chances import LEAST_ERROR, less_likely
from router.prompt_steps import PromptSteps
from serving.messages import Role
from serving.step_cost import StepCost

NEVER = 0.01  # a chance that is not worth computing with
LATE_SHARE = 0.5  # of what a late prompt takes that those to come are kept waiting by
GUESSED_ERROR = 0.5  # of a step cost that is taken from other workers


@dataclass(slots=True)
class Prediction:
    """Seconds. The handoff delays the second token, so `transfer` counts in `token`.

    `ttft` is `queue` and `prefill`, corrected by what such predictions came to; `tpot` is `token`, corrected likewise:
    a mean, which placements are compared by. `usual_tpot` is what such texts usually take, told of the chosen
    placement, where it decodes (router.usual_tpot).
    `error` and `tpot_error` are the standard deviations of ln(observed / predicted); `urgency` is whose errors TTFT's
    are (router.calibration). `due_in` is when the first token of a text is due, seconds from the decision on;
    infinite where it is due at no time, or has come before.
    """

    queue: float
    prefill: float
    transfer: float
    step: float  # a decode step with the request in it
    token: float
    ttft: float
    tpot: float
    error: float
    tpot_error: float = LEAST_ERROR
    urgency: int = 0
    due_in: float = math.inf
    usual_tpot: float | None = None


class KnownCosts:
    """The step costs of some workers. One that reports none is taken for one like the others of its role.

    `known` is False where nobody reports any: then there is nothing to predict with. What is typical of a role is
    looked for when the first that reports none is asked about: nearly always there is none.
    """

    __slots__ = ("_typical", "_workers", "known")

    def __init__(self, *workers: Sequence[Candidate]):
        self._workers = workers
        self._typical: dict[Role, StepCost] = {}
        self.known = any(worker.cost is not None for worker in chain(*workers))

    def of(self, worker: Candidate) -> StepCost:
        return worker.cost or self._alike(worker.status.role)

    def _alike(self, role: Role) -> StepCost:
        found = self._typical.get(role)
        if found is None:
            seen = [(each.status.role, each.cost) for each in chain(*self._workers) if each.cost is not None]
            alike = [cost for other, cost in seen if other == role]
            found = self._typical[role] = typical(alike or [cost for _, cost in seen])
        return found

    def step_seconds(self, worker: Candidate) -> float:
        """A decode step of what the worker has now."""
        return worker.step_seconds if worker.cost is not None else self.of(worker).seconds(worker.decode_load)


def typical(costs: Sequence[StepCost]) -> StepCost:
    """The median of each coefficient, which is nothing that these workers have measured themselves."""
    return StepCost(
        fixed=median(cost.fixed for cost in costs),
        token=median(cost.token for cost in costs),
        pair=median(cost.pair for cost in costs),
        sequence=median(cost.sequence for cost in costs),
        context=median(cost.context for cost in costs),
        error=max(GUESSED_ERROR, *(cost.error for cost in costs)),
    )


def backlog_seconds(worker: Candidate, cost: StepCost, now: float) -> float:
    """Until the prompts that are there now are computed; a worker that predicts nothing says how many tokens wait."""
    left = worker.prompts_left_at - now
    if not left > 0.0:
        left = 0.0
    return left if worker.cost is not None else max(left, cost.token * worker.queued_tokens)


class QueuePlace:
    """Where a prompt would stand among those that wait at a worker, however long it takes there itself.

    Its `priority` and `due` are what the worker orders its queue by; `due` is infinite without a TTFT objective.
    `displaced` is for who asks what a copy there costs: None until it is known.
    """

    __slots__ = ("_ahead", "_behind", "_due_in", "_every", "_left", "displaced", "drift", "priority", "worker")

    def __init__(self, worker: Candidate, cost: StepCost, priority: int, due: float, drift: Drift, now: float):
        self.worker, self.priority, self.drift = worker, priority, drift
        self._due_in = (due if due < math.inf else now + UNHURRIED) - now
        self._left = backlog_seconds(worker, cost, now)
        self._ahead = self._every = 0.0
        self._behind: Sequence[tuple[float, float]] = ()  # seconds until each is due, and until it is computed
        self.displaced: float | None = None
        if worker.queued:
            self._stand(worker.queued, due if due < math.inf else now + UNHURRIED, now)

    def _stand(self, queued: Sequence[QueuedPrompt], due: float, now: float) -> None:
        factor, priority, behind = self.drift.factor, self.priority, list[tuple[int, float, float]]()
        ahead = every = ends = 0.0
        for other in queued:
            seconds, level = other.seconds * other.share, _level(other, now)
            every += seconds
            if level < priority:
                ahead += seconds
                ends += factor * other.seconds * other.share
            elif now + other.seconds <= other.due:
                theirs = _due(other, now)
                if level == priority and theirs <= due:
                    ahead += seconds
                    ends += factor * other.seconds * other.share
                else:
                    behind.append((level, theirs, factor * other.seconds * other.share))
        behind.sort(key=itemgetter(0, 1))
        late = list[tuple[float, float]]()
        for _, theirs, seconds in behind:
            ends += seconds
            if theirs > now:
                late.append((theirs - now, ends))
        self._ahead, self._every, self._behind = ahead, every, late

    def queue_seconds(self, compute: float) -> float:
        """Until the prompt, which takes `compute` seconds, is begun: those it does not pass, of all that wait.

        A worker computes first what is due first, and last of a level what will be late in any case (prefill.ordering).
        The router knows that of the prompts it has sent, each of which counts until its first token comes; what others
        have sent is taken to be spread likewise, as far as its own tell: as if one more as long as this one went first.
        Where it has sent all, what the worker says beyond them is that they take longer.
        """
        if not self.worker.queued:
            return self._left
        ahead, every = self._ahead, self._every
        others, doubt = self._left - every, compute if self.worker.strangers else 0.0
        if others <= 0.0:
            return ahead
        return ahead + others * ((ahead + doubt) / (every + doubt) if every + doubt > 0.0 else 1.0)

    def lost(self, compute: float, queue: float, chance: float) -> float:
        """How many prompts are expected to miss their TTFT objective because of this one: that wait, or are to come.

        It takes `compute` seconds after a `queue`, and is in time itself by a `chance`.
        """
        lost = self.queued_lost(compute) if self._behind else 0.0
        return lost + self.newcomers_lost(compute, queue, chance) if self.worker.arrivals else lost

    def queued_lost(self, compute: float) -> float:
        """Of the prompts that wait, those that are expected to miss it as this one passes them."""
        drift, lost = self.drift, 0.0
        error, sure, added = drift.error, drift.sure, drift.factor * compute
        for left, ends in self._behind:
            lost += less_likely(left, ends, ends + added, error, sure)
        return lost if lost > 0.0 else 0.0

    def newcomers_lost(self, compute: float, queue: float, chance: float) -> float:
        """Of requests like those that come in time from this worker, those that will be late behind this prompt.

        Those that come while it waits `queue` seconds and is computed, and are due later or less important: others pass
        it. One that is late itself, which it is not by a `chance`, is passed by all that are as important, and counts
        by a part (queue_seconds). A worker whose prompts are late anyhow has nothing to lose: what can meet its
        objectives nowhere goes there, and not to one that others need.
        """
        drift, ours, lost = self.drift, self.priority, 0.0
        factor, error, sure = drift.factor, drift.error, drift.sure
        waits, taken = queue * factor, compute * factor
        for priority, limit, seconds, rate in self.worker.arrivals:
            if priority < ours:
                continue
            alone, behind, in_time = seconds * factor, waits + taken, 1.0
            if priority == ours:
                in_time = chance
                if self._due_in > limit:
                    behind -= self._due_in - limit  # seconds: those that come then come to stand behind it
            if behind > 0.0 and in_time > NEVER:
                before = waits + alone
                after = before + taken
                if after * sure > limit:  # else it is certain that they are in time
                    lost += rate * behind * in_time * less_likely(limit, before, after, error, sure)
            if in_time < 1.0 - NEVER:
                fewer = less_likely(limit, alone, alone + taken, error, sure)
                lost += rate * taken * (1.0 - in_time) * LATE_SHARE * fewer
        return lost


def _level(prompt: QueuedPrompt, now: float) -> int:
    """Its priority, raised by a class for each AGE that it has waited and is due, as workers do (prefill.ordering)."""
    if prompt.at is None:
        return prompt.priority
    waited = now - (max(prompt.at, prompt.due - AGE) if prompt.due < math.inf else prompt.at)
    return prompt.priority - STEP * int(waited / AGE) if waited >= AGE else prompt.priority


def _due(prompt: QueuedPrompt, now: float) -> float:
    """When it is due, or treated as due."""
    return prompt.due if prompt.due < math.inf else (now if prompt.at is None else prompt.at) + UNHURRIED


def token_seconds(worker: Candidate, step: float, prompt: float) -> float:
    """The mean time between tokens, where a decode step takes `step` seconds and some take `prompt` seconds more.

    Sequences get a token of either kind of step: the rates add up, each for its share of the time. A step of nothing
    may take nothing.
    """
    share = worker.prompt_share
    return 1.0 / ((1.0 - share) / step + share / (step + prompt)) if share and step else step


def after_backlog(token: float, pause: float, backlog: float, tokens: int) -> float:
    """The mean time between so many tokens, `pause` seconds each while a backlog of prompts is computed, then `token`.

    What waits behind a prompt when it is computed is not a matter of chance: its decode goes on beside it.
    """
    if backlog <= 0.0 or pause <= token:
        return token
    beside = backlog / pause
    return pause if beside >= tokens else (backlog + (tokens - beside) * token) / tokens


def step_seconds(worker: Candidate, cost: StepCost, tokens: int, output: int) -> float:
    """A decode step with one more sequence, of `tokens`, once all have grown by half of its `output`."""
    decodes = worker.decode_load
    rows = decodes.sequences + 1
    return rows_seconds(cost, rows, decodes.context_tokens + tokens + rows * output / 2)


def rows_seconds(cost: StepCost, rows: int, context: float) -> float:
    """A step of one token each for so many sequences of `context` tokens in all: that of their StepLoad."""
    return cost.fixed + cost.token * rows + cost.pair * context + cost.sequence * rows + cost.context * context


def others_lost(worker: Candidate, steps: PromptSteps, before: float, after: float) -> float:
    """How many of the running sequences are expected to miss their TPOT objective because a request joins them.

    Seconds a token before and after, in steps without prompts; they are off by as much as the step cost is. A worker
    gives prompts no more than the objectives leave (prefill.chunking), and what a handoff kept others waiting is over:
    so how far TPOTs have been off is no risk that a request adds to.
    """
    error, sure, lost = steps.cost.error, steps.sure, 0.0
    for objective, count in worker.objectives:
        lost += count * less_likely(objective, before, after, error, sure)
    return max(0.0, lost)
