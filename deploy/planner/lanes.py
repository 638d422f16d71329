"""A queue of requests that one worker works off step by step: prompts, decode steps, or both in a step.

Pure: the queueing model behind the first stage of a search. It decides nothing that serves; it is far cheaper than the
production classes, which judge its finalists (deploy/planner/simulated.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from deploy.planner.costs import StageCosts
from deploy.simulator.profiles import StepWork

NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneRules:
    """How a worker fills its steps.

    `budget` tokens a step at most. `whole` prompts are never cut; `prompts_first` lets no decode step begin while
    prompts wait, and then none runs beside them. `room` is the KV tokens that may be held when a sequence comes in;
    those that are in grow beyond it, since what is preempted here and there is not modelled.
    `batch_context`: sequences with more context than that in all decode in rounds, each a token in as many steps as
    it takes. `pipelined`: a step begins when the first stage is free, else when the step before has ended.
    """

    budget: int
    room: int
    whole: bool = False
    prompts_first: bool = False
    pipelined: bool = False
    batch_context: int | None = None


@dataclass(slots=True)
class Waiting:
    """A request: `number` in the trace, its prompt's tokens, those it will generate, and how much is computed."""

    number: int
    prompt: int
    output: int
    computed: int = 0


@dataclass(slots=True)
class ServingLane:
    """One batch that lives on: push requests in the order of time, `advance`, and read `first` and `finish`.

    `first` and `finish` are shared lists, seconds by a request's number. A prompt's request stays and decodes where
    `decodes`, and leaves with its first token otherwise.
    """

    costs: StageCosts
    rules: LaneRules
    first: list[float]
    finish: list[float]
    decodes: bool = True
    clock: float = 0.0
    ended: list[int] = field(default_factory=list)  # numbers of requests that have left since it was last emptied
    load: int = 0  # tokens that wait or are held, by which a pool chooses
    _ended_at: float = 0.0
    _prompts: deque[Waiting] = field(default_factory=deque)
    _ready: deque[Waiting] = field(default_factory=deque)  # computed elsewhere, waiting for room
    _running: list[tuple[int, int, int]] = field(default_factory=list)  # last step, number, tokens at the end
    _steps: int = 0
    _filling: int = 0  # tokens of prompts that are being computed
    _context: int = 0
    _work: StepWork = field(default_factory=StepWork)

    def push(self, at: float, request: Waiting) -> None:
        """A request that comes at `at`, no earlier than what was pushed or advanced to before."""
        if not (self._prompts or self._ready or self._running):
            self.clock = max(self.clock, at)
        self.load += self._size(request)
        (self._ready if request.computed >= request.prompt else self._prompts).append(request)

    def advance(self, until: float) -> None:
        """All steps that begin before `until`."""
        while self.clock < until and (self._prompts or self._ready or self._running):
            self._step()

    def _step(self) -> None:
        work, done = self._work, list[Waiting]()
        work.prompts = work.prompt_tokens = work.prompt_context = work.decoding = work.decoding_context = 0
        work.prompt_pairs = 0.0
        self._admit()
        if not self.rules.prompts_first:
            work.decoding, work.decoding_context = len(self._running), self._context
        self._fill(work, done)
        if self.rules.prompts_first and not work.prompts:
            work.decoding, work.decoding_context = len(self._running), self._context
        stage, latency = self._seconds(work)
        ended = self.clock + latency
        if self.rules.pipelined:
            ended = max(ended, self._ended_at + stage)
        self.clock = self.clock + stage if self.rules.pipelined else ended
        self._ended_at = ended
        if work.decoding:
            self._decoded(ended)
        for request in done:
            self._prefilled(request, ended)

    def _seconds(self, work: StepWork) -> tuple[float, float]:
        most = self.rules.batch_context
        if most is None or work.prompts or work.decoding_context <= most:
            return self.costs.seconds(work)
        steps = work.decoding_context / most
        one = StepWork(decoding=round(work.decoding / steps), decoding_context=most)
        stage, latency = self.costs.seconds(one)
        return stage * steps, latency * steps

    def _admit(self) -> None:
        """Those that were computed elsewhere, in order, while their KV has room; one alone always has."""
        while self._ready and self._fits(self._ready[0]):
            self._run(self._ready.popleft())

    def _size(self, request: Waiting) -> int:
        """Tokens it holds when it leaves."""
        return request.prompt + (request.output if self.decodes else 0)

    def _fits(self, request: Waiting) -> bool:
        held = self._context + self._filling
        return not held or held + request.prompt <= self.rules.room

    def _fill(self, work: StepWork, done: list[Waiting]) -> None:
        """Prompts in order until the step's budget or the KV's room is used."""
        left = self.rules.budget - work.decoding
        while self._prompts and left > 0:
            request = self._prompts[0]
            if not request.computed:
                if not self._fits(request):
                    break
                self._filling += request.prompt
            count = request.prompt - request.computed
            if count > left:
                if self.rules.whole and work.prompts:
                    self._filling -= request.prompt
                    break
                count = count if self.rules.whole else left
            work.add_prompt(request.computed, count)
            request.computed += count
            left -= count
            if request.computed == request.prompt:
                done.append(self._prompts.popleft())

    def _decoded(self, ended: float) -> None:
        self._steps += 1
        self._context += len(self._running)
        while self._running and self._running[0][0] <= self._steps:
            _, number, tokens = heappop(self._running)
            self._context -= tokens
            self._leave(number, tokens, ended)

    def _prefilled(self, request: Waiting, ended: float) -> None:
        self.first[request.number] = ended
        self._filling -= request.prompt
        tokens = self._size(request)
        if not self.decodes or request.output <= 1:
            self._leave(request.number, tokens, ended)
        else:
            self._run(request)

    def _run(self, request: Waiting) -> None:
        """From the next step on, a token a step: the first came with the prompt."""
        heappush(self._running, (self._steps + request.output - 1, request.number, request.prompt + request.output))
        self._context += request.prompt + 1

    def _leave(self, number: int, tokens: int, ended: float) -> None:
        self.finish[number] = ended
        self.load -= tokens
        self.ended.append(number)
