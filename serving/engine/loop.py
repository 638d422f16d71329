"""Runs an engine in a thread of its own and carries what it brings out to the event loop, once per step.

The only place where the two meet. If the engine's thread dies of an exception, or somebody who is told of its steps
breaks, the worker must leave: what it holds may be inconsistent, and what was to be told is lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.engine.engine import Engine
from serving.engine.plan import Work
from serving.engine.sequence import SequenceOutput, SequenceState

log = logging.getLogger(__name__)

TAKEN_SECONDS = 0.0005  # that the engine waits at most until the event loop takes what a step has brought out


class OutputListener(Protocol):
    """Takes what the engine brings out; called on the event loop."""

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """All outputs of one step, among them those that are meant for other listeners."""


class EngineLoop:
    """`start()` it on a running event loop; wake it when there is new work; `stop()` it when all is done."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.shares_cores = True  # steps compute on those that the event loop runs on
        self.crashed = False
        self._wake = threading.Condition()
        self._awake = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._untaken = threading.Lock()  # held from when outputs are given to the event loop until listeners have some

    def start(self, listeners: Sequence[OutputListener], on_crash: Callable[[], None]) -> None:
        """Run steps from now on. `on_crash` is called on the event loop, once, if the engine or a listener breaks."""
        self._loop = asyncio.get_running_loop()
        self._listeners = tuple(listeners)
        self._on_crash = on_crash
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

    def fail(self) -> None:
        """What computes is gone, though no step has found out: as if one had broken. On the event loop."""
        self._crash()

    def end(self, seq: SequenceState) -> None:
        """End a sequence; wakes the engine, since its blocks may be what another waits for."""
        self.engine.end(seq)
        self.wake()

    def _run(self) -> None:
        clean = False
        try:
            while not self._stopping:
                outputs = self.engine.step(self._layer_done)
                if outputs is None:
                    self._sleep()
                self._carry(outputs)
            self._carry(self.engine.settle())
            clean = True
        finally:
            if not clean:
                self._loop.call_soon_threadsafe(self._crash)

    def _sleep(self) -> None:
        with self._wake:
            while not self._awake and not self._stopping:
                self._wake.wait()
            self._awake = False

    def _carry(self, outputs: list[SequenceOutput] | None) -> None:
        """Tell the listeners; where steps compute on these cores, the next is planned when they have been called.

        Then clients read their tokens while it is planned. Later they would take a core from one thread that computes,
        for which all others wait.
        """
        if not outputs:
            return
        self._untaken.acquire(blocking=False)
        self._loop.call_soon_threadsafe(self._surely, self._tell_outputs, outputs)
        if self.shares_cores:
            self._untaken.acquire(timeout=TAKEN_SECONDS)

    def _tell_outputs(self, outputs: list[SequenceOutput]) -> None:
        try:
            for listener in self._listeners:
                listener.deliver(outputs)
        finally:
            if self._untaken.locked():
                self._untaken.release()  # the engine's thread never does

    def _layer_done(self, work: Sequence[Work], layer: int) -> None:
        progress = [(item.seq, item.seq.computed + item.count) for item in work]
        self._loop.call_soon_threadsafe(self._surely, self._tell_layer, progress, layer)

    def _tell_layer(self, progress: list[tuple[SequenceState, int]], layer: int) -> None:
        for seq, upto in progress:
            if seq.prefill.handoff is not None:
                seq.prefill.handoff.layer_done(layer, upto)

    def _surely(self, tell: Callable[..., None], *what: object) -> None:
        """Tell the listeners; one that breaks leaves others untold, so it is a crash of the whole."""
        told = False
        try:
            tell(*what)
            told = True
        finally:
            if not told:
                self._crash()

    def _crash(self) -> None:
        if self.crashed:
            return
        self.crashed = True
        log.critical("the engine has broken; this worker cannot go on")
        self._stopping = True
        self.wake()
        self._on_crash()
