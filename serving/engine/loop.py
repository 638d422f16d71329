"""Runs an engine in a thread of its own and carries what it brings out to the event loop, once per step.

The only place where the two meet. If the engine's thread dies of an exception, the worker is told and must leave:
nothing it holds can be trusted any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from serving.engine.engine import Engine
from serving.engine.plan import Work
from serving.engine.sequence import SequenceOutput, SequenceState

log = logging.getLogger(__name__)


class EngineLoop:
    """`start()` it on a running event loop; wake it when there is new work; `stop()` it when all is done."""

    def __init__(self, engine: Engine, *, on_crash: Callable[[], None] | None = None):
        self.engine = engine
        self.on_crash = on_crash
        self.crashed = False
        self.after_step: list[Callable[[], None]] = []  # called on the event loop after a step's outputs
        self._wake = threading.Condition()
        self._awake = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.layer_listener = self._layer_done
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Let the step in progress end, and what has been begun after it, then join the thread."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def wake(self, *, hurry: bool = True) -> None:
        """There may be work: call after handing a sequence to a scheduler. `hurry`: that can run now."""
        if hurry:
            self.engine.hurry()
        with self._wake:
            self._awake = True
            self._wake.notify()

    def end(self, seq: SequenceState) -> None:
        """End a sequence; wakes the engine, since its blocks may be what another waits for."""
        self.engine.end(seq)
        self.wake()

    def _run(self) -> None:
        clean = False
        try:
            while not self._stopping:
                outputs = self.engine.step()
                if outputs is None:
                    self._sleep()
                elif outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
            outputs = self.engine.settle()
            if outputs:
                self._loop.call_soon_threadsafe(self._deliver, outputs)
            clean = True
        finally:
            if not clean:
                self.crashed = True
                self._loop.call_soon_threadsafe(self._tell_crash)

    def _sleep(self) -> None:
        with self._wake:
            while not self._awake and not self._stopping:
                self._wake.wait()
            self._awake = False

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sink = output.seq.prefill_sink if output.prefilled else output.seq.sink
            if sink is None and output.error is not None:
                sink = output.seq.prefill_sink
            if sink is not None:
                sink.deliver(output)
        for callback in self.after_step:
            callback()

    def _layer_done(self, work: Sequence[Work], layer: int) -> None:
        progress = [(item.seq, item.seq.computed + item.count) for item in work]
        self._loop.call_soon_threadsafe(self._tell_layer, progress, layer)

    def _tell_layer(self, progress: list[tuple[SequenceState, int]], layer: int) -> None:
        for seq, upto in progress:
            if seq.handoff is not None:
                seq.handoff.layer_done(layer, upto)

    def _tell_crash(self) -> None:
        log.critical("the engine's thread died; this worker cannot go on")
        if self.on_crash is not None:
            self.on_crash()
