"""The steps in which a worker computes prompts beside what it decodes: what its objectives let them have and take.

Pure arithmetic, of one worker and the TPOT objective of one request more. It is the same until the worker changes,
however many requests ask, and is kept at the candidate: a choice asks for dozens, and few workers change between two.
"""

from __future__ import annotations

from math import inf

from router.candidate import Candidate
from router.chances import sure_ratio
from serving.step_cost import GAP, LEAST_CHUNK, StepCost

MOST_KEPT = 4  # TPOT objectives that a candidate keeps its steps for
UNTOLD = 512  # tokens that a step computes at most, where a worker does not say


class PromptSteps:
    """Of a worker by a step cost. `tpot` are the seconds of the request's own objective once it decodes there.

    Where sequences run that have a TPOT objective, a step computes as many tokens of prompts as the tightest allows
    (prefill.chunking).
    """

    __slots__ = ("_paced", "_room", "added", "alone", "beside", "chunk_seconds", "cost", "decode", "first_chunk",
                 "held", "most", "pause", "sure")  # fmt: skip

    def __init__(self, worker: Candidate, cost: StepCost, tpot: float | None):
        rows, tightest = worker.decode_load, worker.tightest_tpot
        if tightest is None or (tpot is not None and tpot < tightest):
            tightest = tpot
        self.cost = cost
        self.most = most = worker.status.max_batched_tokens or UNTOLD  # tokens of a step
        self.pause = inf if tightest is None else cost.pause_seconds(tightest)  # seconds of a step with prompts at most
        self.held = inf if tpot is None else cost.pause_seconds(tpot) / GAP  # a token, as the objective holds prompts
        self.decode = worker.step_seconds if cost is worker.cost else cost.seconds(rows)  # a step of what decodes there
        self.beside = self.decode - cost.fixed if rows.sequences else 0.0  # what that adds to one with prompts
        self._room = max(1, most - rows.new_tokens) if rows.sequences else most
        self._paced = rows.sequences > 0 and tightest is not None
        self.first_chunk = self.chunk(0)  # tokens
        self.chunk_seconds = cost.chunk_seconds(0, self.first_chunk)  # a step of these alone
        self.added = cost.added_seconds(0, most)  # what a step full of prompts takes more
        self.alone = (cost.fixed + cost.chunk_seconds(0, most) - cost.fixed) / most  # a token of prompts in such a step
        self.sure = sure_ratio(cost.error)

    def chunk(self, start: int) -> int:
        """Tokens of a prompt, from position `start` on, that a step has beside what the worker decodes."""
        if not self._paced:
            return self._room
        return max(min(LEAST_CHUNK, self._room), self.cost.chunk_beside(self.pause, start, self.decode, self._room))

    def prompt_seconds(self, start: int, end: int) -> float:
        """Computing positions `start` to `end` of a prompt, beside what the worker decodes."""
        chunk = self.chunk(start) if start else self.first_chunk
        return self.cost.prompt_seconds(start, end, chunk, beside=self.beside)

    def beside_seconds(self, tokens: int) -> float:
        """What prompts of so many tokens add to the decode steps that compute some of them too."""
        cost, chunk = self.cost, self.first_chunk
        return (self.chunk_seconds if tokens >= chunk else cost.chunk_seconds(0, tokens)) - cost.fixed

    def pause_seconds(self, step: float) -> float:
        """A step of a decode batch, `step` seconds by itself, that computes as much of long prompts as it may."""
        return min(step + self.added, max(step, self.pause))

    def held_seconds(self, alone: float) -> float:
        """The most that a worker's prompts let a token take in the mean, which takes `alone` seconds without them.

        It gives prompts the slack of the request's objective in each step, and so never more than that in all.
        """
        return max(alone, self.held)

    def slowdown(self, rows: int, beside: float) -> float:
        """How many times as long prompts take, while some always wait, as alone; so many sequences' step is `beside`.

        A step then has as many tokens of theirs as the tightest objective leaves: nobody is early.
        """
        cost, chunk = self.cost, max(1, self.most - rows)
        if self.pause < inf:
            chunk = max(min(LEAST_CHUNK, chunk), cost.chunk_beside(self.pause / GAP, 0, beside, chunk))
        return (beside + cost.chunk_seconds(0, chunk) - cost.fixed) / chunk / self.alone


def prompt_steps(worker: Candidate, cost: StepCost, tpot: float | None) -> PromptSteps:
    """Those of a worker by this cost. Kept where it is its own; one that is guessed may be another for the next."""
    kept = worker.prompt_steps
    found: PromptSteps | None = kept.get(tpot)
    if found is None or found.cost is not cost:
        found = PromptSteps(worker, cost, tpot)
        if cost is worker.cost:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[tpot] = found
    return found
