"""The wait until a machine has reported its free memory to its host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.free_pages import all_reported, reports, told_since

TABLE = """           CPU0       CPU1
  8:          0          7   IO-APIC   8-edge      rtc0
 31:          0      10346 PCI-MSIX-0000:00:01.0   3-edge      virtio0-stats
 32:      11421         20 PCI-MSIX-0000:00:01.0   4-edge      virtio0-reporting_vq
NMI:          0          0   Non-maskable interrupts
"""
ARM = """           CPU0       CPU1
 32:       1421         20   ITS-MSI 16388 Edge      virtio0-reporting_vq
"""
FAST = {"quiet": 0.05, "every": 0.001}


def counting(first: int, changes: int) -> Callable[[], int]:
    """One report more in each of so many looks after the first."""
    made = iter(range(first, first + changes))
    return lambda: next(made, first + changes)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "interrupts"


@pytest.mark.parametrize(("text", "count"), [(TABLE, 11_441), (ARM, 1_441)])
def test_reports_of_all_cores_are_counted(table: Path, text: str, count: int) -> None:
    table.write_text(text)
    assert reports(table) == count


def test_what_cannot_be_told_is_not_called_none_at_all(table: Path) -> None:
    assert reports(table) is None, "there is no such table"
    for text in ("", "\n", TABLE.replace("-reporting_vq", "-virtqueues"), TABLE.replace("reporting_vq", "r, virtio3")):
        table.write_text(text)
        assert reports(table) is None
    table.write_bytes(TABLE.encode().replace(b"rtc0", b"\xff"))
    assert reports(table) == 11_441


def test_what_is_told_of_a_measurement() -> None:
    assert told_since(5, lambda: 7) == "free memory was reported to the host 2 times meanwhile"
    assert told_since(5, lambda: 4) == "free memory was reported to the host 0 times meanwhile", "a core has gone"
    for before, now in ((None, 7), (5, None)):
        assert "cannot be told" in told_since(before, lambda now=now: now)


@pytest.mark.parametrize("first", [0, 70])
async def test_it_waits_until_reports_end(first: int) -> None:
    said = list[str]()
    count = counting(first, 30)
    await all_reported(said.append, **FAST, count=count)
    assert count() == first + 30
    assert not said, "nobody has waited for long"


async def test_a_first_report_that_comes_late_is_waited_for() -> None:
    loop, looks = asyncio.get_running_loop(), list[float]()

    def count() -> int:
        looks.append(loop.time())
        return int(looks[-1] - looks[0] > 0.1)

    await all_reported(lambda line: None, quiet=0.3, every=0.001, count=count)
    assert looks[-1] - looks[0] > 0.4


async def test_whoever_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.free_pages.TOLD_EVERY", 0.02)
    said = list[str]()
    await all_reported(said.append, quiet=0.2, every=0.001, count=lambda: 3)
    assert 1 <= len(said) <= 10
    assert said[0].startswith("waiting until free memory has been reported to the host")


async def test_it_gives_up_on_a_machine_that_is_never_quiet_and_says_so() -> None:
    said = list[str]()
    await all_reported(said.append, **FAST, most=0.1, count=counting(0, 1_000_000))
    assert len(said) == 1
    assert "measuring all the same" in said[0]


async def test_a_machine_that_cannot_tell_is_not_waited_for() -> None:
    looks = list[None]()
    await all_reported(lambda line: None, quiet=60.0, count=lambda: looks.append(None))
    assert len(looks) == 1
