"""What the benches of served ranks make of the steps and times they have noted."""

from __future__ import annotations

from dataclasses import replace

from scripts.served_balance import step_table
from scripts.served_group import Step
from scripts.served_losses import gap_at

SHORT = Step(
    began=0.0,
    seconds=0.01,
    cpu_seconds=0.005,
    core_seconds=0.0,
    sequences=4,
    prompt_tokens=0,
    moved_bytes=0,
    placements=1,
)


def rows(steps: list[Step]) -> dict[str, list[str]]:
    tables = [line.strip("| ").split(" | ") for line in step_table(steps) if line.startswith("| ")]
    return {name: cells for name, *cells in tables}


def test_steps_that_move_are_told_from_those_that_do_not() -> None:
    copying = [replace(SHORT, seconds=0.03, moved_bytes=count) for count in (100, 200)]
    prompt = replace(SHORT, seconds=0.9, moved_bytes=200, prompt_tokens=7)
    after = replace(SHORT, moved_bytes=200)
    switched = replace(after, seconds=0.02, placements=2)
    found = rows([SHORT] * 30 + copying + [after] * 3 + [prompt] + [switched] + [replace(switched, seconds=0.01)] * 9)
    assert found["weights are copied"][:5] == ["2", "30.0", "30.0", "30.0", "3.00"]
    assert found["nothing moves"][3] == "10.0", "the step with a prompt is none of them"
    assert "experts are switched" not in found, "a single step has no tail"


def test_a_gap_is_that_around_the_harm() -> None:
    times = [0.0, 1.0, 2.0, 2.5, 7.0, 7.5, 8.5]
    assert gap_at(times, 3.0) == 4.5
    assert gap_at(times, 2.25) == 4.5, "the step that was hit may be the one after"
    assert gap_at(times, 0.5) == 1.0
