"""The project's source as the rules of the house see it: which files there are, and what each imports.

Files are parsed, never imported, so a rule can be checked however unfinished the rest is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("serving", "kvcache", "prefill", "decode", "router", "deploy", "bench")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def files(*folders: str, patterns: tuple[str, ...] = ("*.py",)) -> list[Path]:
    """Files of these top-level folders that people wrote, relative to the root."""
    found = (path for folder in folders for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    return sorted(
        path.relative_to(ROOT)
        for path in found
        if "__pycache__" not in path.parts and not any(path.match(pattern) for pattern in GENERATED)
    )


def room_files() -> list[Path]:
    return files(*ROOMS)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `name` is as precise as the statement tells, `from a import b` gives `a` and maybe `a.b`."""

    name: str
    line: int
    at_start: bool  # runs when the importing module is imported

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Everything a file imports, wherever in it."""
    return tuple(_walk(tree(path), at_start=True))


def _walk(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_start)
        elif isinstance(child, ast.ImportFrom):
            yield from _from(child, at_start)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, at_start=False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), at_start=False)
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), at_start=at_start)
        else:
            yield from _walk(child, at_start=at_start)


def _from(statement: ast.ImportFrom, at_start: bool) -> Iterator[Import]:
    assert statement.level == 0, f"line {statement.lineno}: imports are written out in full"
    assert statement.module is not None
    yield Import(statement.module, statement.lineno, at_start)
    for alias in statement.names:
        name = f"{statement.module}.{alias.name}"
        if module_file(name) is not None:
            yield Import(name, statement.lineno, at_start)


def module_file(name: str) -> Path | None:
    """The project's file of a module, relative to the root; None for a foreign one, or none at all."""
    path = Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / candidate).is_file():
            return candidate
    return None


def module_name(path: Path) -> str:
    parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
    return ".".join(parts)


def start_closure(path: Path) -> dict[str, str]:
    """Every module that is imported when this file is, by the file and line that first asks for it."""
    found: dict[str, str] = {}
    pending = [path]
    seen = {path}
    while pending:
        current = pending.pop()
        for name, line in _at_start(current):
            found.setdefault(name, f"{current}:{line}")
            file = module_file(name)
            if file is not None and file not in seen:
                seen.add(file)
                pending.append(file)
    return found


def _at_start(path: Path) -> Iterator[tuple[str, int]]:
    """What importing this file imports, the packages around each module included."""
    for found in imports(path):
        if found.at_start:
            parts = found.name.split(".")
            for end in range(1, len(parts) + 1):
                yield ".".join(parts[:end]), found.line
