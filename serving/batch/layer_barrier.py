"""A barrier at which a step waits, layer by layer, for KV that other threads write into its blocks. No torch.

Python opens it; the compiled kernels (`LayerBarrier` of abi.h) and the model's modules wait at it. It does not know
what writes the KV.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from ctypes import c_int64
from typing import ClassVar

PAUSE_SECONDS = 50e-6  # between looks: the threads that write the KV need the cores
FAILED = -1


class LayerBarrierC(ctypes.Structure):
    """See abi.h."""

    _fields_: ClassVar = [("arrived", c_int64), ("hurried", c_int64), ("left", c_int64), ("waited", c_int64)]


class LayerBarrier:
    """Opened on any thread; waited at by one step at a time, which calls `begin` first. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.moved_at = clock()  # when it was last opened further, or shut
        self._fields = LayerBarrierC()
        self._lock = threading.Lock()

    def open(self, layers: int) -> None:
        """The KV of this many leading layers is written, all of it.

        A thread that sees the count must see the KV too: giving up and taking the lock lies between both writes.
        """
        with self._lock:
            if self._fields.arrived != FAILED:
                self._fields.arrived = layers
        self.moved_at = self.clock()

    def fail(self) -> None:
        """No more KV will come: a step that waits leaves, and so does one that comes to a layer later."""
        with self._lock:
            self._fields.arrived = FAILED
        self.moved_at = self.clock()

    def hurry(self) -> None:
        """Other sequences wait for this step: it leaves where it would wait."""
        self._fields.hurried = 1

    def begin(self) -> None:
        self._fields.hurried = self._fields.left = self._fields.waited = 0

    @property
    def left(self) -> bool:
        """True if the step has left without its result: some layer was not there."""
        return bool(self._fields.left)

    @property
    def waited_seconds(self) -> float:
        """Seconds the step has waited here."""
        return int(self._fields.waited) * 1e-9

    @property
    def address(self) -> int:
        return ctypes.addressof(self._fields)

    def passes(self, layer: int) -> bool:
        """Wait until the layer is there; False when the step has to leave instead."""
        fields = self._fields
        if fields.arrived > layer:
            return True
        began = time.perf_counter_ns()
        while fields.arrived != FAILED and fields.arrived <= layer and not fields.hurried:
            time.sleep(PAUSE_SECONDS)
        fields.waited += time.perf_counter_ns() - began
        fields.left = int(fields.arrived <= layer)
        return not fields.left
