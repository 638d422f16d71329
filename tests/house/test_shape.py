"""The shape of the source in numbers: ceilings on its largest functions, and one public class to a name."""

from __future__ import annotations

import ast

import pytest

from scripts.shape import (
    Function,
    Measured,
    deepest_functions,
    duplicate_classes,
    largest_constructors,
    longest_functions,
    report,
)
from tests.house.source import HOUSE

# The most there is today, to be lowered when the largest shrinks. Triton's kernels are one function each, however long.
MOST_LINES = 60
MOST_KERNEL_LINES = 84
MOST_PARAMETERS = 9
MOST_NESTED = 5
KERNELS = "serving/kernels/gpu/"


def above(ceiling: int, ranking: list[Measured]) -> list[str]:
    assert len(ranking) > 10
    return [str(found) for found in ranking if found.number > ceiling]


def test_functions_stay_short() -> None:
    ranking = longest_functions(HOUSE)
    assert above(MOST_LINES, [found for found in ranking if not found.where.startswith(KERNELS)]) == []
    assert above(MOST_KERNEL_LINES, [found for found in ranking if found.where.startswith(KERNELS)]) == []


def test_constructors_stay_small() -> None:
    assert above(MOST_PARAMETERS, largest_constructors(HOUSE)) == []


def test_functions_stay_flat() -> None:
    assert above(MOST_NESTED, deepest_functions(HOUSE)) == []


def test_no_two_public_classes_share_a_name() -> None:
    assert duplicate_classes(HOUSE) == {}


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("return 1", 0),
        ("if a: b", 1),
        ("if a: b\nelif c: d\nelif e: f\nelse: g", 1),
        ("if a: b\nelse:\n    for c in d: e", 2),
        ("try: a\nexcept E:\n    while b:\n        with c: d", 3),
        ("for a in b:\n    def inner():\n        if c: d", 1),
        ("match a:\n    case 1:\n        if b: c", 2),
    ],
)
def test_nesting_counts_compound_statements(text: str, depth: int) -> None:
    node = ast.parse("def function():\n" + "\n".join("    " + line for line in text.splitlines())).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert Function(node, "function", "made_up.py").depth() == depth


def test_parameters_are_counted_without_self() -> None:
    node = ast.parse("def __init__(self, a, /, b, *c, d=1, **e): ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert Function(node, "Made.__init__", "made_up.py").parameters() == 5


def test_the_report_names_every_measure() -> None:
    text = "\n".join(report(HOUSE, 1))
    for words in ("lines of source", "circles of files", "longest functions", "largest constructors", "nesting"):
        assert words in text
