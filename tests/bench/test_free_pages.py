"""The wait until a machine has reported its free memory to its host."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bench.free_pages import EVERY, MOST, QUIET, all_reported, reports, told_since

TABLE = """           CPU0       CPU1
  8:          0          7   IO-APIC   8-edge      rtc0
 31:          0      10346 PCI-MSIX-0000:00:01.0   3-edge      virtio0-stats
 32:      11421         20 PCI-MSIX-0000:00:01.0   4-edge      virtio0-reporting_vq
NMI:          0          0   Non-maskable interrupts
"""
ARM = """           CPU0       CPU1
 32:       1421         20   ITS-MSI 16388 Edge      virtio0-reporting_vq
"""


class Machine:
    """Time that passes while somebody sleeps, and reports at some of its seconds, all of them from `noisy` on."""

    def __init__(self, *at: float, noisy: float = math.inf) -> None:
        self.now, self.said, self._at, self._noisy = 0.0, list[str](), at, noisy

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def count(self) -> int:
        return sum(at <= self.now for at in self._at) + int(max(0.0, self.now - self._noisy))


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], Awaitable[None]]:
    async def until_reported(machine: Machine) -> None:
        monkeypatch.setattr("bench.free_pages.time", machine)
        monkeypatch.setattr("bench.free_pages.asyncio", machine)
        await all_reported(machine.said.append, machine.count)

    return until_reported


Wait = Callable[[Machine], Awaitable[None]]


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
    for before, now in ((None, 7), (5, None), (5, 4)):
        assert "cannot be told" in told_since(before, lambda now=now: now)


@pytest.mark.parametrize("reported", [[], [1.0], [2.0, 2.1, 13.0, 24.5], [11.5]])
async def test_it_waits_until_a_while_has_passed_without_a_report(wait: Wait, reported: list[float]) -> None:
    machine = Machine(*reported)
    await wait(machine)
    last = reported[-1] if reported else 0.0
    assert last + QUIET <= machine.now <= last + QUIET + 2 * EVERY


async def test_whoever_waits_is_told(wait: Wait) -> None:
    machine = Machine(*range(0, 60, 5))
    await wait(machine)
    assert machine.said == [
        f"waiting until free memory has been reported to the host: {seconds} s" for seconds in (10, 20, 30, 40, 50, 60)
    ]


async def test_it_gives_up_on_a_machine_that_is_never_quiet_and_says_so(wait: Wait) -> None:
    machine = Machine(noisy=0.0)
    await wait(machine)
    assert MOST <= machine.now <= MOST + EVERY
    assert "measuring all the same" in machine.said[-1]


async def test_a_machine_that_cannot_tell_is_not_waited_for(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(machine, "count", lambda: None)
    await wait(machine)
    assert machine.now == 0.0
