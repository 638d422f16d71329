"""Notifies of the layers that a compiled step has written, as its kernels count them in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from serving.forward.layer_events import LayerDone

WATCH_SECONDS = 0.0005  # between reads of how many layers are done


class StepProgress:
    """For one step at a time."""

    def __init__(self) -> None:
        self._done = torch.zeros(1, dtype=torch.int32)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layers")

    @contextmanager
    def told(self, layer_done: LayerDone | None) -> Iterator[Tensor | None]:
        """Where the kernels count layers, int32; `layer_done` has been called for each of these when this is left.

        None where nobody wants to know.
        """
        if layer_done is None:
            yield None
            return
        self._done.zero_()
        ended = threading.Event()
        watching = self._watcher.submit(self._watch, layer_done, ended)
        try:
            yield self._done
        finally:
            ended.set()
            watching.result()

    def _watch(self, layer_done: LayerDone, ended: threading.Event) -> None:
        """On a thread of its own."""
        notified, last = 0, False
        while not last:
            last = ended.wait(WATCH_SECONDS)  # before the number is read: then that is the step's last
            done = int(self._done)
            for layer in range(notified, done):
                layer_done(layer)
            notified = done
