"""What every file keeps to: its length, its opening words, its name, and what it must not contain."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from scripts.source import CODE
from tests.house.source import GENERATED, HOUSE, ROOMS, ROOT, files, imports, lines, room_files, tree

MOST_LINES = 400
WRITTEN = (*ROOMS, "tests", "scripts")
PAGES = ("*.md", "*.toml", "*.yaml")

GONE = {"chunk"}  # left the standard library with Python 3.13 (PEP 594)

UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


def test_no_file_is_longer_than_one_sitting() -> None:
    long = {str(path): len(lines(path)) for path in files(*WRITTEN, patterns=CODE)}
    assert {path: length for path, length in long.items() if length > MOST_LINES} == {}


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        str(path)
        for path in files(*WRITTEN)
        if ast.get_docstring(tree(path)) is None and not (path.name == "__init__.py" and not tree(path).body)
    ]
    assert silent == []


def test_nothing_is_left_unfinished() -> None:
    top = {pattern: [path.relative_to(ROOT) for path in ROOT.glob(pattern)] for pattern in PAGES}
    assert all(top.values())
    written = files(*WRITTEN, patterns=CODE) + files("docs", patterns=("*.md",)) + sum(top.values(), [Path("Makefile")])
    marked = [
        f"{path}:{number}" for path in written for number, line in enumerate(lines(path), 1) if UNFINISHED.search(line)
    ]
    assert marked == []


def test_no_handler_swallows_every_error() -> None:
    """A handler of everything has to pass it on: its last word is a bare `raise`."""
    swallowing = [
        f"{path}:{node.lineno}"
        for path in room_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and catches_all(node) and not raises_on(node.body[-1])
    ]
    assert swallowing == []


def catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
    )


def raises_on(last: ast.stmt) -> bool:
    return isinstance(last, ast.Raise) and last.exc is None


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for path in files(*WRITTEN)}
    folders |= {parent for folder in folders for parent in folder.parents if parent != Path()}
    assert sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()) == []


def test_no_module_is_named_like_a_library() -> None:
    libraries = {found.top for path in files(*WRITTEN) for found in imports(path)} - set(WRITTEN)
    libraries |= {"ray", "triton", "nixl", *sys.stdlib_module_names} - GONE
    assert {path.stem for path in files(*WRITTEN)} >= GONE
    named = [str(path) for path in files(*WRITTEN) if path.stem in libraries and path.name != "__init__.py"]
    assert named == []


@pytest.mark.parametrize("pattern", GENERATED)
def test_what_is_left_out_as_generated_is_there(pattern: str) -> None:
    left_out = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob(pattern)]
    assert left_out
    assert set(left_out).isdisjoint(HOUSE.files(*ROOMS, patterns=("*.py", "*.pyi")))


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "common.py", "misc.py"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert [str(path) for path in files(*WRITTEN) if path.name == name] == []
