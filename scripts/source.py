"""A checkout's source, parsed: which files there are, what each imports, which circles the imports draw.

Files are parsed, never imported, so a checkout can be read however unfinished it is. Paths are relative to its root.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("serving", "kvcache", "prefill", "decode", "router", "deploy", "bench")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
CODE = ("*.py", "*.cpp", "*.h", "*.proto")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, as precisely as the statement tells: `from a import b` gives `a.b` if that is a module."""

    name: str
    line: int
    at_start: bool  # runs when the importing module is imported

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Checkout:
    """The source below `root`. What was parsed is kept."""

    root: Path = ROOT
    _trees: dict[Path, ast.Module] = field(default_factory=dict, repr=False)
    _imports: dict[Path, tuple[Import, ...]] = field(default_factory=dict, repr=False)

    def files(self, *folders: str, patterns: Iterable[str] = ("*.py",)) -> list[Path]:
        """Files of these top-level folders that people wrote."""
        found = (path for folder in folders for pattern in patterns for path in (self.root / folder).rglob(pattern))
        return sorted(
            path.relative_to(self.root)
            for path in found
            if "__pycache__" not in path.parts and not any(path.match(pattern) for pattern in GENERATED)
        )

    def room_files(self) -> list[Path]:
        return self.files(*ROOMS)

    def lines(self, path: Path) -> list[str]:
        return (self.root / path).read_text().splitlines()

    def tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse((self.root / path).read_text(), filename=str(path))
        return self._trees[path]

    def imports(self, path: Path) -> tuple[Import, ...]:
        """Everything a file imports, wherever in it."""
        if path not in self._imports:
            self._imports[path] = tuple(self._walk(self.tree(path), at_start=True))
        return self._imports[path]

    def _walk(self, node: ast.AST, *, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, at_start)
            elif isinstance(child, ast.ImportFrom):
                yield from self._from(child, at_start)
            elif isinstance(child, (*FUNCTIONS, ast.Lambda)):
                yield from self._walk(child, at_start=False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for part in child.body:
                    yield from self._walk(ast.Module([part], []), at_start=False)
                for part in child.orelse:
                    yield from self._walk(ast.Module([part], []), at_start=at_start)
            else:
                yield from self._walk(child, at_start=at_start)

    def _from(self, statement: ast.ImportFrom, at_start: bool) -> Iterator[Import]:
        assert statement.level == 0, f"line {statement.lineno}: imports are written out in full"
        assert statement.module is not None
        names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        modules = [name for name in names if self.module_file(name) is not None]
        if len(modules) < len(names):
            yield Import(statement.module, statement.lineno, at_start)
        for name in modules:
            yield Import(name, statement.lineno, at_start)

    def module_file(self, name: str) -> Path | None:
        """The project's file of a module; None for a foreign one, or none at all."""
        path = Path(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (self.root / candidate).is_file():
                return candidate
        return None

    def start_closure(self, path: Path) -> dict[str, str]:
        """Every module that is imported when this file is, by the file and line that first asks for it."""
        found: dict[str, str] = {}
        pending = [path]
        seen = {path}
        while pending:
            current = pending.pop()
            for name, line in self._at_start(current):
                found.setdefault(name, f"{current}:{line}")
                file = self.module_file(name)
                if file is not None and file not in seen:
                    seen.add(file)
                    pending.append(file)
        return found

    def _at_start(self, path: Path) -> Iterator[tuple[str, int]]:
        """What importing this file imports, the packages around each module included."""
        for found in self.imports(path):
            if found.at_start:
                parts = found.name.split(".")
                for end in range(1, len(parts) + 1):
                    yield ".".join(parts[:end]), found.line

    def file_graph(self) -> dict[str, set[str]]:
        """Each file of the rooms with the files that it imports: at its start, inside functions, or for types alone."""
        graph: dict[str, set[str]] = {}
        for path in self.room_files():
            targets = {self.module_file(found.name) for found in self.imports(path) if found.top in ROOMS}
            graph[path.as_posix()] = {target.as_posix() for target in targets if target not in (None, path)}
        return graph

    def package_graph(self) -> dict[str, set[str]]:
        """Each folder of the rooms with the other folders that its files import."""
        graph: dict[str, set[str]] = {}
        for file, targets in self.file_graph().items():
            package = Path(file).parent.as_posix()
            graph.setdefault(package, set()).update({Path(target).parent.as_posix() for target in targets} - {package})
        return graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes each of which reaches every other of its group: a graph without circles has none."""
    reached = {node: reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in graph
        if node in reached[node]
    }
    return sorted(list(group) for group in groups)


def reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """The nodes that some way of one step or more leads to from `start`, which is among them if it lies on a circle."""
    found: set[str] = set()
    pending = [start]
    while pending:
        for target in graph.get(pending.pop(), ()):
            if target not in found:
                found.add(target)
                pending.append(target)
    return found
