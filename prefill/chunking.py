"""How many prompt tokens a step computes beside the sequences that decode in it: a fixed budget, or what they allow.

Pure: no torch, no clock, no I/O. It sees a step that is being planned; whose prompts come first is not its affair.

Chunks within the slack of running decodes are QoServe's and FairBatching's (arXiv 2503.22562, 2510.14392). A token's
deadline is counted from the sequence's first token, as TPOT is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import exp, inf, log2
from typing import Protocol

from prefill.ordering import Cost, turn
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.step_cost import GAP, MOST_ERROR, SPARED, StepCost, StepLoad

FLOOR = 32  # prompt tokens of LEAN_STEPS steps together at least, whatever decodes
LEAN_STEPS = 8
RISE = 0.02  # of a text's slack, that each of its tokens adds to what is kept for the model's error, until it is enough
ENOUGH = 32  # tokens that may still follow, of a text that keeps less than that
YIELD_SHARE = 0.6  # of the TPOT of more important sequences that less important prompts may slow them down to
MOST_KEPT = 16.0  # TPOTs of slack that are kept for more important prompts at most
HURRY_SHARE = 0.2  # of a TTFT objective that a step may take where the next prompt with it would go first,
HURRIED_STEPS = 4.0
LATELY = 30.0  # seconds that steps are kept short for the next prompt like those that came
MOST_HURRIED = 16  # kinds of them that are remembered


class Chunking(Protocol):
    """Says for each prompt in turn how many tokens of it a step computes."""

    def begin(self, plan: StepPlan, now: float) -> None:
        """A step is planned, beside what the plan holds already."""

    def usual(self, plan: StepPlan) -> int:
        """About how many prompt tokens steps like this one compute in all, one after the other."""
        ...

    def most(self, seq: SequenceState, plan: StepPlan) -> int:
        """The most tokens of this prompt that the step may compute."""
        ...

    def passed(self, seq: SequenceState) -> bool:
        """It may have none: True if prompts behind it may have some in this step all the same."""
        ...

    def took(self, seq: SequenceState, count: int) -> None:
        """So many of them are part of the plan."""


class FixedChunks(Chunking):
    """What the step's budget of tokens leaves."""

    def begin(self, plan: StepPlan, now: float) -> None:
        """Nothing depends on the step."""

    def usual(self, plan: StepPlan) -> int:
        return plan.tokens

    def most(self, seq: SequenceState, plan: StepPlan) -> int:
        return plan.tokens

    def passed(self, seq: SequenceState) -> bool:
        return False

    def took(self, seq: SequenceState, count: int) -> None:
        """The plan counts its tokens."""


class SlackChunks(Chunking):
    """As many tokens as let the step end before a token of a running sequence is due, by the worker's own cost model.

    At most the step's budget. What a sequence is early by may be used, but for what the model's error may take, and no
    step is longer than GAP of its TPOTs. TPOT is a mean, and what one step takes too long others make up for: of a text
    that has only begun nothing is kept, and with each token RISE of its slack more, unless fewer than ENOUGH tokens may
    follow. One that has missed its objectives, or could not catch up any more, is bounded by GAP alone; a TPOT below
    what a step of the sequence alone takes counts as that.

    So that prompts go on, LEAN_STEPS in a row compute FLOOR of their tokens together whatever decodes, the last of them
    what the others did not; where nothing decodes each does. Prompts that are due at no time and less important than a
    running sequence yield to it, however long they have waited: they slow it down to YIELD_SHARE of its TPOT and no
    further, and what it is early by is there for the next prompt that is as important. One that has nothing in a step
    for this reason is passed by prompts that need not yield; if it is the first of the queue, LEAN_STEPS compute FLOOR
    of its tokens all the same. Steps of prompts that some like those that came lately would pass are short as well: the
    next of these waits for the step that runs when it comes. Without a model, or where nobody has an objective that
    says otherwise, it is the fixed budget.
    """

    def __init__(self, cost: Cost):
        self.cost = cost
        self._seconds = inf  # that the step may take
        self._pace = inf  # that steps may take on and on, whatever sequences are early by
        self._model: StepCost | None = None
        self._plan: StepPlan | None = None
        self._yielding: list[tuple[int, float]] | None = None  # what yielding_slack says of it, once it has been asked
        self._closed = inf  # the priority from which on prompts that yield have nothing in this step
        self._passed = False  # the first prompt is one of these
        self._load = StepLoad()
        self._beside = False  # something decodes in the step
        self._alone = 0.0  # seconds of the step without prompts
        self._given = 0  # prompt tokens of this step
        self._asked = False  # the step has a prompt to compute
        self._lately: deque[int] = deque(maxlen=LEAN_STEPS - 1)  # tokens of such steps in a row, less than FLOOR each
        self._now = 0.0
        self._hurried: dict[tuple[int, int], tuple[float, float]] = {}  # TTFT objectives, and when they were last seen

    def begin(self, plan: StepPlan, now: float) -> None:
        if self._asked and (self._passed or self._given < FLOOR):
            self._lately.append(0 if self._passed else self._given)
        else:
            self._lately.clear()
        self._seconds, self._pace, self._given, self._asked, self._now = inf, inf, 0, False, now
        self._beside, self._plan, self._yielding = bool(plan.work), None, None
        self._closed, self._passed = inf, False
        model = self.cost()
        self._model = model = model if model is not None and model.samples else None
        if model is None:
            return
        context = new = 0
        early = tightest = inf
        sure = certain(model)
        most_kept = 1.0 - sure
        for work in plan.work:
            seq = work.seq
            length, goals = len(seq.tokens), seq.objectives
            context += length
            new += work.count
            tpot = goals.tpot
            if tpot < tightest:
                tightest = tpot
            slack = goals.origin + length * tpot - now  # Objectives.slack, spelt out: this is done for every row
            kept = RISE * (length - seq.start)
            slack *= 1.0 - kept if kept < most_kept and _long(seq) else sure
            if slack < early:
                early = slack
        rows = len(plan.work)
        self._load = StepLoad(new, context * new / max(1, rows), rows, context)
        self._alone = model.seconds(self._load)
        if tightest == inf:
            return
        pause = GAP * tightest * sure
        self._pace = pause if early == inf else tightest if tightest > self._alone else self._slow_pace(plan, model)
        self._plan, self._seconds = plan, min(early, pause)
        if self._seconds < self._alone:
            self._seconds = hopeful_slack(plan, now, model, self._alone)

    def _slow_pace(self, plan: StepPlan, model: StepCost) -> float:
        """The pace where a TPOT is no longer than a step without prompts: who has such a one bounds pauses alone."""
        goals = [(len(work.seq.tokens), work.seq.objectives.tpot) for work in plan.work]
        missed = [(length, tpot) for length, tpot in goals if tpot <= self._alone]
        kept = [tpot for _, tpot in goals if tpot > self._alone]
        longest = GAP * certain(model)
        pauses = [longest * max(tpot, model.seconds(StepLoad(1, length, 1, length))) for length, tpot in missed]
        return min(kept + pauses)

    def usual(self, plan: StepPlan) -> int:
        if self._pace == inf or self._model is None:
            return plan.tokens
        return max(FLOOR // LEAN_STEPS, self._model.chunk_within(self._pace, 0, self._load, plan.tokens))

    def most(self, seq: SequenceState, plan: StepPlan) -> int:
        if self._model is None:
            return plan.tokens
        if seq.objectives.priority >= self._closed and seq.objectives.due == inf:
            return 0
        seconds = min(self._seconds, self._yielded(seq, self._model), self._unhurried(seq, self._model))
        if seconds == inf:
            return plan.tokens
        fits = self._model.chunk_within(seconds, seq.computed, self._load, plan.tokens)
        if self._given:
            return fits
        self._asked, wanted = True, min(FLOOR, plan.tokens, seq.uncomputed)
        if fits >= wanted or not self._beside:
            return max(fits, wanted)
        lacking = FLOOR - sum(self._lately) if len(self._lately) == LEAN_STEPS - 1 else 0
        return max(fits, min(wanted, lacking))

    def passed(self, seq: SequenceState) -> bool:
        """Only by prompts that need not yield as it does: what holds all of them back ends the step for all."""
        if self._model is None or self._yielded(seq, self._model) >= self._seconds:
            return False
        self._closed = min(self._closed, seq.objectives.priority)
        self._passed = self._passed or not self._given
        return True

    def took(self, seq: SequenceState, count: int) -> None:
        self._given += count
        if self._model is not None:
            self._load += StepLoad.of(seq.computed, count)

    def _yielded(self, seq: SequenceState, model: StepCost) -> float:
        """How long the step may take with this prompt, for the sake of more important sequences in it."""
        if self._plan is None or seq.objectives.due < inf:
            return inf
        if self._yielding is None:
            self._yielding = yielding_slack(self._plan, self._now, self._alone)
        more_important = bisect_left(self._yielding, (seq.objectives.priority, -inf))
        return self._yielding[more_important - 1][1] * certain(model) if more_important else inf

    def _unhurried(self, seq: SequenceState, model: StepCost) -> float:
        """How long a step of this prompt may take for the sake of those to come that go first; notes its own TTFT."""
        now, ttft_ms, start = self._now, seq.request.slo.ttft_ms, seq.computed
        own = turn(seq, model.seconds(StepLoad.of(start, seq.uncomputed)), now)
        if ttft_ms is not None and 0.0 < ttft_ms < inf and not own[1] and not seq.order.generated:
            self._note(seq.objectives.priority, ttft_ms)
        least = inf
        for (priority, _), (ttft, at) in self._hurried.items():
            if ttft < least and now - at < LATELY and (priority, False, now + ttft) < own:
                least = ttft
        if least == inf:
            return inf
        shortest = self._alone + model.seconds(StepLoad.of(start, 1)) - model.fixed
        return max(HURRY_SHARE * least, HURRIED_STEPS * shortest)

    def _note(self, priority: int, ttft_ms: float) -> None:
        """A prompt that can be in time has come with this TTFT objective."""
        kind = priority, round(log2(ttft_ms))
        self._hurried.pop(kind, None)
        self._hurried[kind] = ttft_ms / 1e3, self._now
        if len(self._hurried) > MOST_HURRIED:
            del self._hurried[next(iter(self._hurried))]


def hopeful_slack(plan: StepPlan, now: float, model: StepCost, alone: float) -> float:
    """The least slack in the plan of sequences that can still be in time; `alone` is a step without prompts. Seconds.

    Less what they keep for the model's error. A late one can catch up if all the tokens it may still have, each `alone`
    seconds, end before its last one is due.
    """
    least, sure = inf, certain(model)
    for work in plan.work:
        seq = work.seq
        goals, length = seq.objectives, len(seq.tokens)
        tpot = goals.tpot
        if tpot < inf:
            slack = goals.slack(length, now)
            pause = tpot if tpot >= alone else max(tpot, model.seconds(StepLoad(1, length, 1, length)))
            pause *= GAP * sure
            used = max(sure, 1.0 - RISE * (length - seq.start)) if _long(seq) else sure
            least = min(least, pause, inf if hopeless(seq, slack, alone) else slack * used)
    return least


def yielding_slack(plan: StepPlan, now: float, alone: float) -> list[tuple[int, float]]:
    """For each priority in the plan, in order, the least slack that sequences up to it leave to less important prompts.

    Seconds, at least 0; `alone` as in hopeful_slack. It is counted from YIELD_SHARE of their TPOT, until they are
    MOST_KEPT tokens early.
    """
    least: dict[int, float] = {}
    for work in plan.work:
        seq = work.seq
        goals = seq.objectives
        if goals.tpot < inf:
            slack = goals.slack(len(seq.tokens), now)
            if not hopeless(seq, slack, alone):
                left = max(0.0, slack - goals.tpot * min(MOST_KEPT, (1.0 - YIELD_SHARE) * seq.output_len))
                least[goals.priority] = min(left, least.get(goals.priority, inf))
    priorities = sorted(least)
    return list(zip(priorities, accumulate((least[priority] for priority in priorities), min), strict=True))


def hopeless(seq: SequenceState, slack: float, alone: float) -> bool:
    """True if the sequence is late and cannot catch up."""
    left = seq.request.sampling.max_tokens - seq.output_len
    return slack - alone + (left - 1) * (seq.objectives.tpot - alone) < 0.0


def _long(seq: SequenceState) -> bool:
    """True if enough tokens may follow to make up for steps that take longer than predicted."""
    return seq.request.sampling.max_tokens - seq.output_len >= ENOUGH


def certain(model: StepCost) -> float:
    """The share of slack that a step may be predicted to take, so that it takes no more than all of it."""
    return exp(-SPARED * min(model.error, MOST_ERROR))
