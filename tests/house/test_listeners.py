"""Listeners are passed in: no code sets another object's `on_…` or `…listener`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import room_files, tree

LISTENER = re.compile(r"_?(on_\w+|(\w+_)?listeners?)")


def assigned(root: ast.AST) -> Iterator[ast.Attribute]:
    """Listener attributes that are assigned."""
    for node in ast.walk(root):
        found: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            found = [part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.expr)]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            found = [node.target]
        yield from (part for part in found if isinstance(part, ast.Attribute) and LISTENER.fullmatch(part.attr))


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def test_listeners_are_passed_in() -> None:
    found = [(path, attribute) for path in room_files() for attribute in assigned(tree(path))]
    assert sum(is_own(attribute) for _, attribute in found) >= 3, "the rule has lost sight of the listeners there are"
    assert [f"{path}:{attribute.lineno}" for path, attribute in found if not is_own(attribute)] == []


@pytest.mark.parametrize(
    "code",
    ["kv.on_published = f", "a.b, c.on_x = f, g", "self.engine.layer_listener = f"],
)
def test_the_rule_sees_a_listener_set_from_outside(code: str) -> None:
    assert [is_own(attribute) for attribute in assigned(ast.parse(code))] == [False]
