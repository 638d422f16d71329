"""Tells, layer by layer, that a step's KV is written: at once where launching is computing, else as the device gets on.

On CUDA an event of each layer's own is recorded behind what writes its KV, and a thread waits for these in turn; the
thread that launches never waits for one. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import torch

LayerDone = Callable[[int], None]


class Event(Protocol):
    """As much of torch.cuda.Event as is used here."""

    def record(self) -> object: ...
    def synchronize(self) -> object: ...


class LayerTeller(Protocol):
    def telling(self, layer_done: LayerDone) -> AbstractContextManager[LayerDone]:
        """Within it, what it gives is called with each layer in turn, behind the launch that writes its KV.

        `layer_done` has been called for all of these when it is left: what it says of a step must not come after the
        step, whose sequences then count its tokens as computed.
        """
        ...


class DirectTeller:
    """For devices on which a call is over when it returns."""

    def telling(self, layer_done: LayerDone) -> AbstractContextManager[LayerDone]:
        return nullcontext(layer_done)


class EventTeller:
    """For a stream of a device: `events` are one for each layer, recorded on the stream that is current then."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layers")

    @contextmanager
    def telling(self, layer_done: LayerDone) -> Iterator[LayerDone]:
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


def layer_teller(layers: int, device: torch.device) -> LayerTeller:
    if device.type != "cuda":
        return DirectTeller()
    # Blocking events let the thread that waits for them sleep: it would else spin beside the one that launches.
    return EventTeller([torch.cuda.Event(blocking=True) for _ in range(layers)])  # type: ignore[no-untyped-call]
