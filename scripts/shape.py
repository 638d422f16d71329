"""Prints a checkout's shape in numbers: lines by room, circles, longest function, constructors, nesting, classes.

`python -m scripts.shape [FOLDER]` reads another checkout as well as this one; it parses and imports nothing of it.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.source import CODE, FUNCTIONS, ROOMS, ROOT, Checkout, circles

COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True, slots=True, order=True)
class Measured:
    """A function of the rooms and one number of it."""

    number: int
    where: str  # file:line Class.function

    def __str__(self) -> str:
        return f"{self.number:6d}   {self.where}"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the rooms; those inside others are functions of their own."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    name: str  # with the classes and functions around it
    file: str

    def measured(self, number: int) -> Measured:
        return Measured(number, f"{self.file}:{self.node.lineno} {self.name}")

    def lines(self) -> int:
        """From `def` to the last statement, docstring included, decorators not."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    def parameters(self) -> int:
        """All but `self`."""
        given = self.node.args
        named = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
        return named + (given.vararg is not None) + (given.kwarg is not None)

    def depth(self) -> int:
        """The most compound statements around one statement; an `elif` stands beside its `if`."""
        return max((nesting(statement) for statement in self.node.body), default=0)


def nesting(node: ast.AST) -> int:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
        return 0
    around = 1 if isinstance(node, COMPOUND) else 0
    inner = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        inner = max(inner, nesting(child) - (1 if chained else 0))
    return around + inner


def functions(checkout: Checkout) -> Iterator[Function]:
    for path in checkout.room_files():
        yield from _functions(checkout.tree(path), "", path.as_posix())


def _functions(node: ast.AST, around: str, file: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = around
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            name = f"{around}.{child.name}".lstrip(".")
        if isinstance(child, FUNCTIONS):
            yield Function(child, name, file)
        yield from _functions(child, name, file)


def longest_functions(checkout: Checkout) -> list[Measured]:
    return sorted((found.measured(found.lines()) for found in functions(checkout)), reverse=True)


def largest_constructors(checkout: Checkout) -> list[Measured]:
    """Written constructors: a dataclass's fields are not counted."""
    written = (found for found in functions(checkout) if found.node.name == "__init__")
    return sorted((found.measured(found.parameters()) for found in written), reverse=True)


def deepest_functions(checkout: Checkout) -> list[Measured]:
    return sorted((found.measured(found.depth()) for found in functions(checkout)), reverse=True)


def classes(checkout: Checkout) -> list[tuple[str, str]]:
    """Name and place of every class."""
    return [
        (node.name, f"{path}:{node.lineno}")
        for path in checkout.room_files()
        for node in ast.walk(checkout.tree(path))
        if isinstance(node, ast.ClassDef)
    ]


def duplicate_classes(checkout: Checkout) -> dict[str, list[str]]:
    """Public class names that are given more than once over all rooms, with where."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, where in classes(checkout):
        if not name.startswith("_"):
            places[name].append(where)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def room_lines(checkout: Checkout) -> dict[str, int]:
    return {room: sum(len(checkout.lines(path)) for path in checkout.files(room, patterns=CODE)) for room in ROOMS}


def report(checkout: Checkout, shown: int) -> Iterator[str]:
    """The lines to print, with the first `shown` of each ranking."""
    lines = room_lines(checkout)
    files = checkout.files(*ROOMS, patterns=CODE)
    yield f"lines of source ({', '.join(pattern.removeprefix('*.') for pattern in CODE)}; without generated code)"
    for room, number in lines.items():
        yield f"{number:6d}   {room}"
    yield f"{sum(lines.values()):6d}   all, in {len(files)} files"
    for kind, graph in (("files", checkout.file_graph()), ("packages", checkout.package_graph())):
        found = circles(graph)
        yield f"circles of {kind} (imports of every kind)"
        yield f"{len(found):6d}   among {len(graph)}"
        for circle in found:
            yield f"         {len(circle)}: {' '.join(circle)}"
    for title, ranking in (
        ("longest functions (lines)", longest_functions(checkout)),
        ("largest constructors (parameters without self)", largest_constructors(checkout)),
        ("deepest nesting (compound statements in a function)", deepest_functions(checkout)),
    ):
        yield title
        yield from map(str, ranking[:shown])
    twice = duplicate_classes(checkout)
    yield "classes"
    yield f"{len(classes(checkout)):6d}   all"
    yield f"{len(twice):6d}   public names given more than once"
    for name, places in twice.items():
        yield f"         {name}: {' '.join(places)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.shape", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="the checkout to read (default: this one)")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="entries of each ranking (default: 3)")
    arguments = parser.parse_args()
    for line in report(Checkout(arguments.folder.resolve()), arguments.show):
        print(line)


if __name__ == "__main__":
    main()
