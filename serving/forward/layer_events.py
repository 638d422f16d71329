"""Notifies, layer by layer, that a step's KV is written: at once on devices where a launch is a result, else by events.

On CUDA one event per layer is recorded behind the kernel that writes its KV, and a thread of its own waits for the
events in turn; the thread that launches never waits for one. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

import torch

from serving.streams import Event, streams_of

LayerDone = Callable[[int], None]

LayerNotifier = Callable[[LayerDone], AbstractContextManager[LayerDone]]
"""`with notifier(layer_done) as written:` a step calls `written(layer)` behind the launch that writes the layer's KV.

`layer_done(layer)` has been called for each of them when the context is left: it must not come after the step, whose
sequences then count its tokens as computed.
"""


class EventNotifier:
    """A `LayerNotifier` for a device's stream: `events`, one per layer, are recorded on the stream current then."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layers")

    @contextmanager
    def __call__(self, layer_done: LayerDone) -> Iterator[LayerDone]:
        recorded: SimpleQueue[int | None] = SimpleQueue()
        watching = self._watcher.submit(self._watch, recorded, layer_done)

        def written(layer: int) -> None:
            self.events[layer].record()
            recorded.put(layer)

        try:
            yield written
        finally:
            recorded.put(None)
            watching.result()

    def _watch(self, recorded: SimpleQueue[int | None], layer_done: LayerDone) -> None:
        while (layer := recorded.get()) is not None:
            self.events[layer].synchronize()
            layer_done(layer)


def layer_notifier(layers: int, device: torch.device) -> LayerNotifier:
    if device.type != "cuda":
        return nullcontext
    return EventNotifier([streams_of(device).event() for _ in range(layers)])
