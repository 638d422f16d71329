"""A disk that is smaller than its node was told, or takes nothing for a while: what is kept, and what is said of it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcache.pool.block import PoolBlock
from kvcache.pool.disk import BlockFolder
from kvcache.pool.store import WARN_SECONDS
from serving.messages import Tier
from tests.kvcache.pool.storage import ONE, Open, block_of, drained, key_of, listened, opened, tiers_of, whole_ones

__all__ = ["opened"]  # a fixture


class SmallDisk:
    """A disk with room for so many blocks, whatever the node was told; `error` is what all writes meet instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 1000) -> None:
        self.room = room
        self.error: int | None = None
        self.tries = 0
        write = BlockFolder.write

        def tight(folder: BlockFolder, block: PoolBlock) -> None:
            self.tries += 1
            record = sum(path.is_file() for path in (folder._root / "blocks").rglob("*"))
            number = self.error or (errno.ENOSPC if record >= self.room else 0)
            if number:
                raise OSError(number, os.strerror(number))
            write(folder, block)

        monkeypatch.setattr(BlockFolder, "write", tight)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("write", ["through", "back"])
def test_on_a_disk_that_is_full_early_new_blocks_take_the_place_of_old_ones(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, write: str
) -> None:
    SmallDisk(monkeypatch, room=3)
    store = opened(0, 50, write=write)
    told = listened(store)
    blocks = [block_of(number) for number in range(10)]
    for block in blocks:
        store.put([block])
        drained(store)
    assert whole_ones(store, blocks) == [False] * 7 + [True] * 3
    assert [told[block.key] for block in blocks] == ["evicted"] * 7 + ["stored"] * 3
    disk = store.tier_stats()[Tier.DISK]
    assert (disk.blocks, disk.bytes, disk.evictions, disk.bytes_written) == (3, 3 * ONE, 7, 10 * ONE)
    (warning,) = warnings(caplog)
    assert str(tmp_path) in warning and "is full" in warning and "smaller disk" in warning
    store.close()
    assert whole_ones(opened(0, 50), blocks) == [False] * 7 + [True] * 3


def test_pins_and_quotas_hold_on_a_disk_that_is_full_early(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(monkeypatch, room=3)
    store = opened(0, 50, quotas={"mine": ONE})
    store.put([block_of(0, namespace="mine"), block_of(1), block_of(2)])
    drained(store)
    store.lookup([key_of(1)], 60.0)
    for number in range(3, 9):
        store.put([block_of(number)])
        drained(store)
    assert set(store.keys()) == {key_of(0), key_of(1), key_of(8)}


def test_a_disk_that_is_full_of_other_things_loses_the_block_and_says_so(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(monkeypatch, room=0)
    store = opened(0, 9)
    store.put([block_of(0)])
    drained(store)
    assert store.keys() == [] and store.tier_stats()[Tier.DISK].bytes == 0
    assert disk.tries == 1 and len(warnings(caplog)) == 1


def test_trouble_is_told_now_and_then(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    disk = SmallDisk(monkeypatch)
    disk.error = errno.EROFS
    store = opened(5, 9, clock=lambda: now[0])

    def put(numbers: Sequence[int]) -> None:
        store.put([block_of(number) for number in numbers])
        drained(store)

    put(range(3))
    assert tiers_of(store) == {key_of(number): (Tier.RAM,) for number in range(3)}
    (warning,) = warnings(caplog)
    assert "cannot be written" in warning and "Read-only" in warning and "in memory alone" in warning
    now[0] = WARN_SECONDS
    put(range(3, 5))
    assert len(warnings(caplog)) == 2


def test_what_could_not_be_written_is_when_ram_has_no_more_room_for_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch)
    disk.error = errno.EROFS
    store = opened(3, 9, write="through")
    blocks = [block_of(number) for number in range(6)]
    store.put(blocks[:3])
    drained(store)
    disk.error = None
    store.put(blocks[3:])
    drained(store)
    assert set(tiers_of(store).values()) <= {(Tier.DISK,), (Tier.RAM, Tier.DISK)}
    assert whole_ones(store, blocks) == [True] * 6


def test_a_block_that_the_disk_gave_up_is_written_again_before_ram_gives_it_up(opened: Open) -> None:
    store = opened(4, 3, write="through")
    told = listened(store)
    blocks = [block_of(number) for number in range(5)]
    for block in blocks[:4]:
        store.put([block])
        drained(store)
    assert tiers_of(store)[key_of(0)] == (Tier.RAM,)
    store.put([blocks[4]])
    drained(store)
    assert tiers_of(store)[key_of(0)] == (Tier.DISK,)
    assert whole_ones(store, blocks) == [True] * 5 and set(told.values()) == {"stored"}
