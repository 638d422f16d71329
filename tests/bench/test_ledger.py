"""The ledger: what was measured is there again, whatever the end of the file looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ledger import Ledger, Trial, TrialKey


def trial(rate: float = 1.0, seed: int = 0, **fields: object) -> Trial:
    key = TrialKey(case="case", contender="a=--mixed 2", rate=rate, seed=seed)
    return Trial(**{"key": key, "offered": 10, "ended": 10, "met": 9, "kinds": {"chat": [10, 9]}} | fields)  # type: ignore[arg-type]


def test_runs_and_notes_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    kept = Ledger(path)
    kept.add(trial(2.1378 / 3))
    kept.note("start", 2.5)
    kept.add(trial(seed=1, stopped=True, errors={"HTTP 429": 2}, warnings=("late",)))
    found = Ledger(path)
    assert found.trials == kept.trials and found.notes == {"start": 2.5}


@given(cut=st.integers(1, 1000))
def test_a_line_that_was_cut_short_is_dropped_and_not_continued(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "runs.jsonl"
    kept = Ledger(path)
    kept.add(trial(1.0))
    whole = path.stat().st_size
    kept.add(trial(2.0))
    content = path.read_bytes()
    path.write_bytes(content[: max(whole, len(content) - cut)])
    again = Ledger(path)
    assert list(again.trials.values()) == [trial(1.0)]
    again.add(trial(3.0))
    assert [one.key.rate for one in Ledger(path).trials.values()] == [1.0, 3.0]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for line in ("{", '{"other": 1}', '{"key": {}}'):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match="line 1"):
            Ledger(path)
