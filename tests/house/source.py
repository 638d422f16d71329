"""The checkout that the rules are held against, and the patterns by which a rule names its files.

A rule that has lost its files holds nothing, so a folder or pattern that matches none is a failure of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from scripts.source import GENERATED, ROOMS, ROOT, Checkout

HOUSE = Checkout(ROOT)
imports = HOUSE.imports
lines = HOUSE.lines
module_file = HOUSE.module_file
room_files = HOUSE.room_files
start_closure = HOUSE.start_closure
tree = HOUSE.tree

__all__ = [
    "GENERATED", "HOUSE", "ROOMS", "ROOT", "files", "imports", "lines", "matching", "module_file", "room_files",
    "start_closure", "tree",
]  # fmt: skip


def files(*folders: str, patterns: Iterable[str] = ("*.py",)) -> list[Path]:
    """Files of these top-level folders that people wrote. Every folder and every pattern has some."""
    for folder in folders:
        assert HOUSE.files(folder, patterns=patterns), f"{folder}/ has no files"
    for pattern in patterns:
        assert HOUSE.files(*folders, patterns=(pattern,)), f"no file is a {pattern}"
    return HOUSE.files(*folders, patterns=patterns)


def matching(pattern: str) -> list[Path]:
    """Files of the rooms whose path from the root matches, `*` standing for slashes as well. There are some."""
    found = [path for path in room_files() if fnmatch(path.as_posix(), pattern)]
    assert found, f"no file of the rooms matches {pattern}"
    return found
