"""A part of a test in which nothing may wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises RuntimeError. The mode ends with the part."""
    torch.cuda.synchronize()
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
