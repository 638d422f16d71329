"""There is one scheduler: what is simulated or replayed is decided by the classes that serve.

The simulator may build them, give them settings and time, and narrow what they do; it plans no step, hands out no
block, chooses no victim and places no request.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import matching, tree

SIMULATED = "deploy/simulator/*.py"
DECIDING = ("decode.", "kvcache.blocks.", "prefill.", "router.", "serving.engine.")  # where the classes that serve lie
CHOICES = {"fill", "fill_ahead", "allocate", "acquire", "grow", "match", "evict", "place", "rank", "choose", "_victim"}
PLANS = {"StepPlan", "Work"}  # made by the engine and its schedulers alone


def findings(module: ast.Module) -> Iterator[str]:
    """Where code decides itself what a production class decides."""
    served = {
        name.asname or name.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DECIDING)
        for name in node.names
    }
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield from overriding(node, served)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in PLANS:
                yield f"{node.lineno} plans a step"
            elif isinstance(called, ast.Attribute) and called.attr == "add" and ast.unparse(called.value) == "plan":
                yield f"{node.lineno} fills a step"


def overriding(found: ast.ClassDef, served: set[str]) -> Iterator[str]:
    """A class that chooses has to be one that serves, and may only narrow what that chooses: it calls it."""
    for method in found.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in CHOICES:
            continue
        if not any(isinstance(base, ast.Name) and base.id in served for base in found.bases):
            yield f"{method.lineno} {found.name}.{method.name} chooses by itself"
        elif "super()." + method.name not in ast.unparse(method):
            yield f"{method.lineno} {found.name}.{method.name} chooses in place of what serves"


def test_the_simulator_decides_nothing() -> None:
    assert [f"{path}:{found}" for path in matching(SIMULATED) for found in findings(tree(path))] == []


def test_it_imports_what_serves() -> None:
    imported = {
        node.module
        for path in matching(SIMULATED)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported >= {
        "decode.scheduler",
        "deploy.worker.build",
        "kvcache.blocks.allocator",
        "kvcache.blocks.manager",
        "prefill.scheduler",
        "router.placer",
        "router.router",
        "serving.engine.engine",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Mine:\n    def fill(self, plan, now): ...", ["2 Mine.fill chooses by itself"]),
        ("def go(plan, seq):\n    plan.add(seq, 1, None)", ["2 fills a step"]),
        ("plan = StepPlan(8, 8)", ["1 plans a step"]),
        (
            "from decode.scheduler import DecodeScheduler\nclass Mine(DecodeScheduler):\n"
            "    def fill(self, plan, now): ...",
            ["3 Mine.fill chooses in place of what serves"],
        ),
        (
            "from decode.scheduler import DecodeScheduler\nclass Mine(DecodeScheduler):\n"
            "    def fill(self, plan, now):\n        if not plan.work:\n            super().fill(plan, now)",
            [],
        ),
        ("class Mine:\n    def seconds(self, work): ...", []),
    ],
)
def test_a_second_scheduler_is_found(text: str, expected: list[str]) -> None:
    assert list(findings(ast.parse(text))) == expected
