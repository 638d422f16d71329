"""Where what is made once for a host is kept: compiled kernels, scales, packed weights, snapshots.

It knows the place and how processes share it, and nothing of what lies there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between looks whether another process has let go
LONGEST_SECONDS = 600.0  # that another process may take: one that hangs stops nobody else for longer


def cache_folder() -> Path:
    """`millrace` in the user's cache folder, `$XDG_CACHE_HOME` or ~/.cache; it need not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "millrace"


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """One process of all that share the folder makes what is kept in `file`, while others wait for it.

    A process that ends lets go, however it ends; after LONGEST_SECONDS others go on beside one that does not. Where the
    folder cannot be written, nobody waits.
    """
    with ExitStack() as held:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(file.with_suffix(".lock").open("w"))
            _wait_for(lock, file)
        yield


def _wait_for(lock: IO[str], file: Path) -> None:
    """Look again and again, since a wait for the lock itself would go on through signals."""
    began = time.monotonic()
    told = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not told:
            log.info("waiting for another process, which makes %s", file)
            told = True
        if time.monotonic() - began > LONGEST_SECONDS:
            log.warning("another process has not made %s within %.0f s: going on beside it", file, LONGEST_SECONDS)
            return
        time.sleep(LOOK_SECONDS)


def written_whole(file: Path, text: str) -> None:
    """Write `file` so that another process sees all of it or what was there before. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        try:
            part.write(text)
            part.close()
            Path(part.name).replace(file)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
