"""What the benches of served ranks make of the steps and times they have noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scripts.served_balance import step_table
from scripts.served_group import Step
from scripts.served_losses import Loss, gap_at, progress
from scripts.slow_spells import SlowSpells

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


def rows(steps: list[Step], spells: Sequence[tuple[float, float]] = ()) -> dict[str, list[str]]:
    slow = SlowSpells()
    slow.found = list(spells)
    tables = [line.strip("| ").split(" | ") for line in step_table(steps, slow) if line.startswith("| ")]
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


def test_steps_in_which_the_machine_was_slow_are_told_apart() -> None:
    steps = [replace(SHORT, began=0.1 * number) for number in range(60)]
    steps[30] = replace(steps[30], seconds=0.09)
    steps[50] = replace(steps[50], seconds=0.025)
    found = rows(steps, [(3.05, 3.07), (3.95, 3.99)])
    assert found["nothing moves"][4:9] == ["9.00", "2", "1", "2.50", "1"]
    assert rows(steps, [(0.0, 9.0)])["nothing moves"][6:9] == ["39", "-", "0"]


def test_a_gap_is_that_around_the_harm() -> None:
    times = [0.0, 1.0, 2.0, 2.5, 7.0, 7.5, 8.5]
    assert gap_at(times, 3.0) == 4.5
    assert gap_at(times, 2.25) == 4.5, "the step that was hit may be the one after"
    assert gap_at(times, 0.5) == 1.0


def test_progress_tells_the_last_loss_and_what_is_left() -> None:
    first = Loss(noticed=0.5, stalled=0.5, client=0.5, back=0.5, rejoined=0.5, repeated=1)
    last = Loss(noticed=1.0, stalled=1.25, client=1.5, back=2.0, rejoined=0.012, repeated=1)
    assert progress([first, last], 10, 2, 6.0) == (
        "2 of 10: rank 2, ms: noticed 1,000, stalled 1,250, a client's wait 1,500, back after 2,000, rejoin stalls 12;"
        " 6 s so far, about 24 s to go"
    )
    assert progress([first, last], 2, 1, 6.0).endswith("about 0 s to go")
