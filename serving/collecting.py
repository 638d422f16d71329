"""How a process that answers requests collects Python's garbage: seldom, and never what it had loaded when it began.

It knows nothing of what the process does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000
"""More new than gone that make a collection due. Choosing a worker makes a hundred and drops them again: with Python's
700 it was what made one due in one of sixty requests, and waited for all that was new to be looked through."""


def collect_seldom() -> None:
    """Call it once everything is loaded: that stays, and looking through it again held everybody up for 0.3 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def loading_modules() -> Iterator[None]:
    """While modules are imported: they stay, and looking through them again and again took a tenth of a start."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextmanager
def collecting_as_served() -> Iterator[None]:
    """The same for a while, for what is measured."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
