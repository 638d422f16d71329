"""Files that change are taken once they can be, and never by half."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.reloaded import ReloadedFiles


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Sum:
    """A file of two numbers, the second of which has to be the double of the first."""

    def __init__(self, path: Path):
        self.path = path
        self.clock = Clock()
        self.write(1, 2)
        self.files = ReloadedFiles([str(path)], self.load, look_seconds=1.0, clock=self.clock)

    def write(self, *numbers: int) -> None:
        self.path.write_text(" ".join(map(str, numbers)))

    def load(self) -> tuple[int, ...]:
        first, second = map(int, self.path.read_text().split())
        if second != 2 * first:
            raise ValueError("not the double")
        return first, second

    def later(self) -> tuple[int, ...]:
        self.clock.now += 1.0
        return self.files.current()


@pytest.fixture
def sums(tmp_path: Path) -> Sum:
    return Sum(tmp_path / "sum")


def test_what_cannot_be_used_at_first_is_an_error(sums: Sum) -> None:
    sums.write(1, 1)
    with pytest.raises(ValueError, match="not the double"):
        ReloadedFiles([str(sums.path)], sums.load)


def test_another_content_is_taken_at_the_next_look(sums: Sum) -> None:
    first = sums.files.current()
    sums.write(2, 4)
    assert sums.files.current() is first
    assert sums.later() == (2, 4) and sums.files.failures == 0
    assert sums.later() is sums.later()


def test_a_half_written_file_leaves_what_was_there_and_is_counted_once(
    sums: Sum, caplog: pytest.LogCaptureFixture
) -> None:
    sums.write(3, 4)
    assert [sums.later() for _ in range(3)] == [(1, 2)] * 3
    assert sums.files.failures == 1 and caplog.text.count("not the double") == 1
    sums.write(3, 5)
    assert sums.later() == (1, 2) and sums.files.failures == 2
    sums.write(3, 6)
    assert sums.later() == (3, 6) and sums.files.failures == 2


def test_a_file_that_is_gone_leaves_what_was_there(sums: Sum) -> None:
    sums.path.unlink()
    assert sums.later() == (1, 2) and sums.files.failures == 1
    sums.write(1, 2)
    assert sums.later() == (1, 2)
    sums.path.unlink()
    assert sums.later() == (1, 2) and sums.files.failures == 2, "gone a second time"


def test_what_changes_while_it_is_read_is_not_taken(sums: Sum) -> None:
    """It may be made of both."""
    sums.write(2, 4)
    load, sums.files._load = sums.load, lambda: (sums.write(5, 10), (2, 10))[1]
    assert sums.later() == (1, 2) and sums.files.failures == 0
    sums.files._load = load
    assert sums.later() == (5, 10)
