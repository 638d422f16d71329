"""Runs an engine without a thread: each step begins and ends on the event loop and lasts as long as its runner says.

In between others open, cancel and end sequences, as they do while a real step computes. It knows neither models nor
costs: those are the runner's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from serving.engine.engine import BegunStep, Engine
from serving.engine.loop import EngineLoop, OutputListener
from serving.engine.plan import Work
from serving.engine.run import RunResult
from serving.engine.sequence import SequenceOutput, SequenceState

ENDS = 64  # of steps, that are remembered: more than end while a message is on its way


class VirtualEngineLoop(EngineLoop):
    """An EngineLoop whose steps pass on the event loop's clock.

    `leaving` is the share of a step after which KV begins to leave for other workers: with many layers, the first's.
    """

    def __init__(self, engine: Engine, leaving: float = 1.0):
        super().__init__(engine)
        self.leaving = leaving
        self._stepping = False
        self._ends: deque[float] = deque(maxlen=ENDS)
        self._rested = asyncio.Event()
        self._layers: list[tuple[list[tuple[SequenceState, int]], int]] = []

    def start(self, listeners: Sequence[OutputListener], on_crash: Callable[[], None]) -> None:
        """Run steps from now on. An engine that breaks stops the simulation, so `on_crash` is not called."""
        self._loop = asyncio.get_running_loop()
        self._listeners = tuple(listeners)
        self._on_crash = on_crash
        self._rested.set()

    async def stop(self) -> None:
        """Let the step in progress end."""
        self._stopping = True
        await self._rested.wait()

    def wake(self, *, hurry: bool = True) -> None:
        if hurry:
            self.engine.hurry()
        if not self._stepping and not self._stopping:
            self._stepping = True
            self._rested.clear()
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a step, or rest until the next wake."""
        if self._stopping:
            self._rest()
            return
        began = self.engine.clock()
        plan, outputs = self.engine.schedule(began)
        if outputs:
            self._tell_kept(outputs)
        if not plan.work:
            self.engine.step_ended = None  # the engine sleeps
            self._rest()
            if outputs:
                self._tell_outputs(outputs)
                self.wake()
            return
        step = self.engine.begun(plan, began)
        result = self.engine.runner.run(plan.work, self._note_layer)
        times = result.times
        seconds = times.batch + times.forward + times.sample
        if self._layers:
            self._loop.call_later(seconds * self.leaving, self._tell_layers, self._layers)
            self._layers = []
        self._loop.call_later(seconds, self._end, step, result, outputs)

    def _end(self, step: BegunStep, result: RunResult, outputs: list[SequenceOutput]) -> None:
        """The next step begins before the listeners hear of this one, as it does when the engine has a thread."""
        outputs = outputs + self.engine.finish(step, result)
        self._ends.append(self._loop.time())
        self._begin()
        if outputs:
            self._tell_outputs(outputs)

    def _tell_kept(self, outputs: Sequence[SequenceOutput]) -> None:
        """The tokens of sequences that give way now, which is told with the next step: they are there already."""
        kept = [(output.seq, output.seq.untold()) for output in outputs]
        told = [SequenceOutput(seq, delta) for seq, delta in kept if delta is not None]
        if told:
            self._tell_outputs(told)

    @property
    def computing(self) -> bool:
        """Whether a step is in progress, or about to begin."""
        return self._stepping

    def ended_since(self, at: float) -> int:
        """How many of the last steps have ended later than `at` on the event loop's clock; ENDS at most."""
        return sum(end > at for end in self._ends)

    def _rest(self) -> None:
        self._stepping = False
        self._rested.set()

    def _note_layer(self, work: Sequence[Work], layer: int) -> None:
        """The runner says so when the step begins; handoffs hear of it later."""
        self._layers.append(([(item.seq, item.seq.computed + item.count) for item in work], layer))

    def _tell_layers(self, layers: list[tuple[list[tuple[SequenceState, int]], int]]) -> None:
        for progress, layer in layers:
            self._tell_layer(progress, layer)
