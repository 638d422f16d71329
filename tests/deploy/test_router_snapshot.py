"""A router's snapshot in its file: written whole or not at all, now and then and at the end, and read only if whole."""

from __future__ import annotations

import asyncio
import logging
import threading
from base64 import b64decode
from pathlib import Path

import pytest

from deploy import router_snapshot
from deploy.router_snapshot import SnapshotFile, SnapshotKeeper, snapshot_file
from deploy.runtime.settings import read_settings
from deploy.serve import _keeper
from tests.router.test_snapshot import OF_AN_EARLIER_VERSION, Life, lived


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "folder" / "router.snapshot")


async def test_a_router_goes_on_where_the_one_before_it_stopped(
    file: SnapshotFile, caplog: pytest.LogCaptureFixture
) -> None:
    first = SnapshotKeeper(lived().placer, file)
    caplog.set_level(logging.INFO)
    first.load()
    assert not caplog.records, "the first start has nothing to read, and says nothing"
    first.start()
    await first.stop()
    after = Life()
    SnapshotKeeper(after.placer, file).load()
    assert after.known() == {"a-1": 10, "b-1": 4}
    assert "2 workers are known from before, and 10 of their blocks" in caplog.text
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name], "nothing else is left there"


@pytest.mark.parametrize("written", [b"", b"{}", b"millrace router 1\n", lived().snapshot()[:-1]])
def test_what_is_damaged_is_ignored_with_a_word(
    file: SnapshotFile, written: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(written)
    after = Life()
    SnapshotKeeper(after.placer, file).load()
    assert after.known() == {} and len(caplog.records) == 1 and str(file.path) in caplog.text


def test_what_an_earlier_version_kept_otherwise_is_named(file: SnapshotFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b64decode(OF_AN_EARLIER_VERSION))
    after = Life()
    caplog.set_level(logging.INFO)
    SnapshotKeeper(after.placer, file).load()
    assert after.known() == {"a-1": 10, "b-1": 4}
    known, lost = (record.getMessage() for record in caplog.records)
    assert known == "2 workers are known from before, and 10 of their blocks"
    parts = "calibration of TTFT, calibration of TPOT, usual TPOTs"
    assert lost == f"{file.path} is of another version; the router begins without: {parts}"


async def test_a_file_that_is_a_folder_is_left_alone(file: SnapshotFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.mkdir(parents=True)
    keeper = SnapshotKeeper(lived().placer, file)
    keeper.load()
    await keeper.save()
    assert len(caplog.records) == 2
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


async def test_it_saves_now_and_then_and_only_what_is_new(file: SnapshotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_snapshot, "SAVE_SECONDS", 0.001)
    monkeypatch.setattr(router_snapshot, "PAUSE_SECONDS", 0.0)
    written: list[bytes] = []
    monkeypatch.setattr(SnapshotFile, "write", lambda self, data: written.append(data))
    life = lived()
    keeper = SnapshotKeeper(life.placer, file)
    keeper.start()
    while not written:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert len(written) == 1
    life.beat("c", stored=3)
    while len(written) < 2:
        await asyncio.sleep(0.001)
    await keeper.stop()
    assert len(written) <= 3 and written[0] != written[-1], "one may have been under way as the worker came"


async def test_the_last_snapshot_waits_for_the_one_that_is_being_written(
    file: SnapshotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled: what it writes late would take the place of what is newer."""
    monkeypatch.setattr(router_snapshot, "SAVE_SECONDS", 0.001)
    began, gate = threading.Event(), threading.Event()
    written: list[bytes] = []
    write = SnapshotFile.write

    def slowly(file: SnapshotFile, data: bytes) -> None:
        began.set()
        if not written:
            assert gate.wait(10)
        written.append(data)
        write(file, data)

    monkeypatch.setattr(SnapshotFile, "write", slowly)
    life = lived()
    keeper = SnapshotKeeper(life.placer, file)
    keeper.start()
    await asyncio.to_thread(began.wait)
    life.placer.outputs.ended("new", 7)
    stopping = asyncio.create_task(keeper.stop())
    await asyncio.wait([stopping], timeout=0.1)
    gate.set()
    await stopping
    assert len(written) == 2 and written[0] != written[1] == file.read()


async def test_requests_are_placed_while_a_snapshot_is_made(file: SnapshotFile) -> None:
    """What comes between two of its pieces is in it or is not; what it says is true of some moment since it began."""
    life = Life()
    life.beat("a", stored=10)
    keeper = SnapshotKeeper(life.placer, file)
    saving = asyncio.create_task(keeper.save())
    turns = 0
    while not saving.done():
        life.beat(f"late-{turns % 40}", stored=3)
        await asyncio.sleep(0)
        turns += 1
    assert turns >= life.index.shards
    after = Life()
    SnapshotKeeper(after.placer, file).load()
    assert after.known() == {"a-1": 10, "late-0-1": 3}, "the one it began with, and one that came before it began"


def test_each_router_of_a_host_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {snapshot_file(*of).path for of in (("m", "0.0.0.0", 80), ("m", "0.0.0.0", 81), ("n", "0.0.0.0", 80))}
    assert len(files) == 3 and {path.parent for path in files} == {tmp_path / "millrace"}
    assert snapshot_file("m", "0.0.0.0", 80).path in files


async def test_where_a_router_keeps_its_snapshot_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    life, model, found = lived(), Path("model"), {}
    for wanted in ("never", "auto", str(tmp_path / "mine")):
        settings = read_settings({"router_snapshot": wanted})
        keeper = _keeper(life.placer, settings, model)
        found[wanted] = keeper.file.path if keeper is not None else None
        if keeper is not None:
            await keeper.stop()
            assert keeper.file.path.exists()
    auto = snapshot_file("model", settings.http.host, settings.http.port).path
    assert list(found.values()) == [None, auto, tmp_path / "mine"]
