"""A one-line progress bar on a terminal, and nothing at all where there is none; and lines on stderr.

It is told of requests as they finish; it knows nothing of servers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from bench.sse import Outcome

WIDTH = 24  # characters of the bar
EVERY_S = 0.1  # redraws at most so often


class Progress:
    """Draws `label ████░░ 12/32  310 tok/s  1 failed` over itself on `stream`."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.perf_counter):
        self._stream = stream
        self._clock = clock
        self._on = stream.isatty()
        self._drawn = 0.0
        self.start("", 0)

    def start(self, label: str, total: int) -> None:
        """A new measurement of `total` requests."""
        self._label, self._total = label, total
        self._done = self._failed = self._tokens = 0
        self._began = self._clock()
        self._draw(force=True)

    def step(self, outcome: Outcome) -> None:
        """One request has ended."""
        if outcome.error == "interrupted":
            return
        self._done += 1
        self._failed += outcome.error is not None
        self._tokens += outcome.output_tokens
        self._draw(force=self._done == self._total)

    def clear(self) -> None:
        """Takes the line away, so that something else can be printed."""
        if self._on:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, *, force: bool) -> None:
        now = self._clock()
        if not self._on or not self._total or (now - self._drawn < EVERY_S and not force):
            return
        self._drawn = now
        filled = self._done * WIDTH // self._total
        speed = self._tokens / (now - self._began) if now > self._began else 0.0
        line = f"{self._label} {'█' * filled}{'░' * (WIDTH - filled)} {self._done}/{self._total}  {speed:.0f} tok/s"
        if self._failed:
            line += f"  {self._failed} failed"
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()


def say(line: str) -> None:
    """On stderr, where figures are not."""
    print(line, file=sys.stderr, flush=True)
