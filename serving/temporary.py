"""Temporary folders and files that go with the process that made them, also where it leaves while they are in use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_folders: set[Path] = set()
_files: set[Path] = set()


@contextmanager
def temporary_folder(where: Path) -> Iterator[Path]:
    """A new folder in `where`, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="millrace-", dir=where) as made:
        folder = Path(made)
        _folders.add(folder)
        try:
            yield folder
        finally:
            _folders.discard(folder)


def also_ours(folder: Path) -> None:
    """A folder of our parent, which it does not remove itself where it is killed."""
    _folders.add(folder)


@contextmanager
def gone_at_the_end(file: Path) -> Iterator[None]:
    """Removes the file at the end, if nobody has before."""
    _files.add(file)
    try:
        yield
    finally:
        _files.discard(file)
        with suppress(OSError):
            file.unlink()


def remove_temporary_folders() -> None:
    """All there are, and files, for a process that ends without unwinding."""
    for file in tuple(_files):
        with suppress(OSError):
            file.unlink()
    for folder in tuple(_folders):
        shutil.rmtree(folder, ignore_errors=True)
