"""The ring of places that copies pass through: a copy that breaks off, or a device that fails, gives its place back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvcache.memory import staging_ring
from kvcache.memory.staging_ring import PLACES, StagingRing
from serving.streams import Event, Immediate


class Failing(Immediate):
    """A device that is lost: nothing that is waited for comes to an end."""

    lost = False

    def event(self, *, sleeps: bool = True) -> Event:
        return self

    def record(self, stream: Any = None) -> None:
        if self.lost:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("lost", [False, True])
def test_every_place_comes_back(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy without a place would wait for ever, and its worker would seem to be alive."""
    monkeypatch.setattr(staging_ring, "PLACE_BYTES", 64)
    device = Failing()
    ring = StagingRing(device)
    device.lost = lost
    for _ in range(3 * PLACES):
        with suppress(RuntimeError, OSError), ring.place(ring.outward):
            raise OSError("the copy breaks off")
        assert ring._free.qsize() == PLACES
