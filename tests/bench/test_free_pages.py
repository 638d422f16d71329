"""The wait until a machine has reported its free memory to its host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.free_pages import all_reported, reports

TABLE = """           CPU0       CPU1
  8:          0          7   IO-APIC   8-edge      rtc0
 31:          0      10346 PCI-MSIX-0000:00:01.0   3-edge      virtio0-stats
 32:      11421         20 PCI-MSIX-0000:00:01.0   4-edge      virtio0-reporting_vq
NMI:          0          0   Non-maskable interrupts
"""
FAST = {"quiet": 0.05, "every": 0.001}


def counting(changes: int) -> Callable[[], int]:
    """One report more in each of the first so many looks."""
    made = iter(range(1, changes + 1))
    return lambda: next(made, changes)


def test_reports_of_all_cores_are_counted(tmp_path: Path) -> None:
    table = tmp_path / "interrupts"
    table.write_text(TABLE)
    assert reports(table) == 11_441


def test_a_machine_that_reports_nothing_has_no_reports(tmp_path: Path) -> None:
    table = tmp_path / "interrupts"
    assert reports(table) == 0, "there is no such table"
    table.write_text(TABLE.replace("virtio0-reporting_vq", "virtio1-requests"))
    assert reports(table) == 0


async def test_it_waits_until_reports_end() -> None:
    said = list[str]()
    count = counting(30)
    assert await all_reported(said.append, **FAST, count=count)
    assert count() == 30
    assert not said, "nobody has waited for long"


async def test_it_gives_up_on_a_machine_that_is_never_quiet_and_says_so() -> None:
    said = list[str]()
    assert not await all_reported(said.append, **FAST, most=0.1, count=counting(1_000_000))
    assert len(said) == 1 and "still being reported" in said[0]


async def test_a_machine_that_has_never_reported_anything_is_not_waited_for() -> None:
    looks = list[None]()

    def count() -> int:
        looks.append(None)
        return 0

    assert await all_reported(lambda line: None, quiet=60.0, count=count)
    assert len(looks) == 1
