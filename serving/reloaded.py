"""What is made of files, made anew when they change; files that cannot be used leave what was there before.

It knows nothing of what the files are for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from serving.given_files import read_given

log = logging.getLogger(__name__)

T = TypeVar("T", covariant=True)
LOOK_SECONDS = 1.0  # between looks at the files, which happen when somebody asks


class ReloadedFiles(Generic[T]):
    """`load` makes it, raising OSError or ValueError for files that cannot be used; so does the constructor.

    From any thread. `failures` counts contents that were refused, each once.
    """

    def __init__(
        self,
        paths: Sequence[str],
        load: Callable[[], T],
        *,
        look_seconds: float = LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.paths = tuple(Path(path) for path in paths)
        self.failures = 0
        self._load = load
        self._look_seconds = look_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._contents = self._read()
        self._refused: tuple[bytes, ...] | None = None
        self._current = load()
        self._looked = clock()

    def current(self) -> T:
        """The same object until other files have been taken."""
        with self._lock:
            if self._clock() - self._looked >= self._look_seconds:
                self._look()
                self._looked = self._clock()
            return self._current

    def _look(self) -> None:
        found = self._read()
        if found == self._contents:
            self._refused = None
            return
        try:
            made = self._load()
        except (OSError, ValueError) as error:
            if self._refused != found:
                self._refused = found
                self.failures += 1
                log.error("%s: %s; what was loaded before stays in use", ", ".join(map(str, self.paths)), error)
            return
        if self._read() != found:  # written to meanwhile: what was made may be of neither; the next look sees
            return
        self._contents, self._refused, self._current = found, None, made
        log.info("loaded anew: %s", ", ".join(map(str, self.paths)))

    def _read(self) -> tuple[bytes, ...]:
        """A file that cannot be read counts as an empty one, which `load` refuses."""
        return tuple(_bytes(path) for path in self.paths)


def _bytes(path: Path) -> bytes:
    try:
        return read_given(path)
    except OSError:
        return b""
