"""A folder of blocks: what was written comes back, whatever was damaged does not, and only one node uses it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.pool.block import PoolBlock, make_block
from kvcache.pool.blockfile import FIRST_READ, encode_header, stored_bytes
from kvcache.pool.disk import BlockFolder
from serving.errors import CorruptChunk
from tests.kvcache.pool.storage import block_of, key_of


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BlockFolder]:
    folder = BlockFolder(tmp_path / "pool")
    yield folder
    folder.close()


def file_of(folder: BlockFolder, block: PoolBlock) -> Path:
    return folder._path(block.key, block.namespace)


def read(folder: BlockFolder, block: PoolBlock, first: int = 0, last: int = 0, most: int | None = None) -> bytes:
    return folder.read(block.key, block.namespace, first, last, most).payload


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    for number, parts in enumerate((1, 3, 30)):
        block = block_of(number, parts=parts, size=1000, namespace=f"tenant.{number}")
        folder.write(block)
        stretch = folder.read(block.key, block.namespace)
        assert stretch.payload == block.payload
        assert (stretch.header.sizes, stretch.header.digests) == (block.sizes, block.digests)
        assert file_of(folder, block).stat().st_size == stored_bytes(block)
    folder.close()


def test_parts_are_read_alone_and_a_few_at_a_time(folder: BlockFolder) -> None:
    block = block_of(1, parts=6, size=100)
    folder.write(block)
    for first in range(6):
        for last in range(first + 1, 7):
            stretch = folder.read(block.key, block.namespace, first, last)
            assert (stretch.first, stretch.last) == (first, last)
            assert stretch.payload == b"".join(block.part(part) for part in range(first, last))
    assert read(folder, block, 2, 0, 250) == bytes(block.part(2)) + bytes(block.part(3))
    assert read(folder, block, 2, 0, 1) == block.part(2)  # at least one
    assert folder.read(block.key, block.namespace, 0, 99).last == 6
    beyond = folder.read(block.key, block.namespace, 9, 0)
    assert (beyond.first, beyond.last, beyond.payload) == (6, 6, b"")


def test_a_header_longer_than_the_first_read_is_read_to_its_end(folder: BlockFolder) -> None:
    block = make_block(key_of(1), "default", [bytes([part % 256]) for part in range(500)])
    assert len(encode_header(block)) > FIRST_READ
    folder.write(block)
    assert read(folder, block) == block.payload


def test_parts_may_be_empty(folder: BlockFolder) -> None:
    block = make_block(key_of(1), "default", [b"", b"xy", b""])
    folder.write(block)
    assert folder.read(block.key, "default").last == 3
    assert read(folder, block, 1, 0) == b"xy"


def test_every_flipped_bit_of_a_file_is_found(folder: BlockFolder) -> None:
    block = block_of(1, parts=2, size=8)
    folder.write(block)
    path = file_of(folder, block)
    good = path.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(CorruptChunk):
            read(folder, block)
    path.write_bytes(good)
    assert read(folder, block) == block.payload


def test_every_truncation_and_every_addition_is_found(folder: BlockFolder) -> None:
    block = block_of(1, parts=2, size=8)
    folder.write(block)
    path = file_of(folder, block)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptChunk):
            read(folder, block, 0, 1)
    for more in (b"\0", good):
        path.write_bytes(good + more)
        with pytest.raises(CorruptChunk):
            read(folder, block)


@settings(max_examples=200)
@given(data=st.data())
def test_no_rewriting_of_a_stretch_of_the_file_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Torn writes: some pages of the file are there, others are zeros or of an older file."""
    folder = BlockFolder(tmp_path_factory.mktemp("torn"))
    block, other = block_of(1, parts=4, size=64), block_of(2, parts=4, size=64)
    folder.write(other)
    old = file_of(folder, other).read_bytes()
    folder.write(block)
    good = file_of(folder, block).read_bytes()
    start = data.draw(st.integers(0, len(good) - 1))
    end = data.draw(st.integers(start + 1, len(good)))
    stale = data.draw(st.sampled_from([b"\0" * len(good), old]))
    torn = good[:start] + stale[start:end] + good[end:]
    file_of(folder, block).write_bytes(torn)
    if torn == good:
        assert read(folder, block) == block.payload
    else:
        with pytest.raises(CorruptChunk):
            read(folder, block)
    folder.close()


def test_files_that_changed_places_are_found(folder: BlockFolder) -> None:
    one, other = block_of(1), block_of(2)
    folder.write(one)
    folder.write(other)
    first, second = file_of(folder, one), file_of(folder, other)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    for block in (one, other):
        with pytest.raises(CorruptChunk, match="another key"):
            read(folder, block)


def test_a_file_that_was_moved_to_another_namespace_is_found(folder: BlockFolder) -> None:
    block = block_of(1, namespace="a")
    folder.write(block)
    stolen = folder._path(block.key, "b")
    stolen.parent.mkdir(parents=True)
    file_of(folder, block).rename(stolen)
    with pytest.raises(CorruptChunk, match="another namespace"):
        folder.read(block.key, "b")


def test_a_file_that_is_gone_is_damage_and_one_that_cannot_be_read_now_is_not(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block_of(1)
    with pytest.raises(CorruptChunk, match="cannot be read"):
        read(folder, block)
    folder.write(block)

    def busy(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(OSError, match="Too many"):
        read(folder, block)


def test_a_write_that_fails_leaves_nothing(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(block_of(1))
    assert list((folder._root / "aside").iterdir()) == []
    assert folder.scan() == []


# ---- what a node finds when it starts ----------------------------------------------------------------------------


def test_a_scan_finds_what_there_is_oldest_first(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    blocks = [block_of(number, namespace="ab"[number % 2]) for number in range(6)]
    for block in blocks:
        folder.write(block)
        os.utime(file_of(folder, block), (1000.0 - block.key[0], 1000.0 - block.key[0]))
    folder.close()
    again = BlockFolder(tmp_path)
    found = again.scan()
    expected = sorted(blocks, key=lambda block: -block.key[0])
    assert [(file.key, file.namespace, file.bytes) for file in found] == [
        (block.key, block.namespace, stored_bytes(block)) for block in expected
    ]
    assert [file.written_at for file in found] == [1000.0 - block.key[0] for block in expected]
    again.close()


def test_a_scan_removes_what_is_not_a_block_in_its_place(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    block = block_of(1)
    folder.write(block)
    (tmp_path / "aside" / "17").write_bytes(b"left over")
    lru = file_of(folder, block).parent
    strays = [lru / "notes.txt", lru / key_of(2).hex(), lru / block.key.hex().upper(), lru / "00"]
    strays = [stray for stray in strays if stray != file_of(folder, block)]
    twin = folder._path(block.key, "zz")
    twin.parent.mkdir(parents=True)
    for stray in (*strays, twin):
        stray.write_bytes(b"?")
    folder.close()
    again = BlockFolder(tmp_path)
    assert [file.key for file in again.scan()] == [block.key]
    left = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    assert len(left) == 1
    assert list((tmp_path / "aside").iterdir()) == []
    again.close()


def test_a_folder_in_use_is_refused_until_it_is_free(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    with pytest.raises(ValueError, match=rf"in use by another pool node \(process {os.getpid()}\).*of its own"):
        BlockFolder(tmp_path)
    folder.close()
    BlockFolder(tmp_path).close()


def test_a_folder_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    folder.write(block_of(1))
    folder.close()
    (tmp_path / "FORMAT").write_text("millrace KV pool, format 99\n")
    (tmp_path / "aside" / "1").write_bytes(b"of the other version")
    with pytest.raises(ValueError, match=r"format 99.*another folder, or delete"):
        BlockFolder(tmp_path)
    assert (tmp_path / "aside" / "1").exists()
    (tmp_path / "FORMAT").write_text("millrace KV pool, format 1\n")
    BlockFolder(tmp_path).close()  # the lock had been given back


def test_a_folder_of_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files"):
        BlockFolder(tmp_path)
    assert (tmp_path / "blocks" / "thesis.txt").exists()


def test_a_node_that_died_at_its_very_first_start_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711\n")
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "FORMAT").write_text("mill")
    folder = BlockFolder(tmp_path)
    folder.write(block_of(1))
    assert read(folder, block_of(1)) == block_of(1).payload
    folder.close()


def test_a_full_disk_is_no_obstacle_to_a_node_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BlockFolder(tmp_path)
    folder.write(block_of(1))
    folder.close()
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", raising(full))
        again = BlockFolder(tmp_path)
    assert read(again, block_of(1)) == block_of(1).payload
    again.close()


def raising(error: OSError) -> Callable[..., Never]:
    def refuse(*_: object) -> Never:
        raise error

    return refuse


def test_a_folder_that_cannot_be_had_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"file.* cannot hold blocks: it is not a folder: give the node a folder"):
            BlockFolder(path)
    monkeypatch.setattr(os, "open", raising(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(ValueError, match="cannot hold blocks: Read-only file system: give the node a folder"):
        BlockFolder(tmp_path / "fresh")


def folders(folder: BlockFolder) -> int:
    return sum(path.is_dir() for path in (folder._root / "blocks").rglob("*"))


def test_folders_go_with_their_last_block(folder: BlockFolder) -> None:
    blocks = [block_of(number, namespace=f"tenant-{number % 50}") for number in range(200)]
    for block in blocks:
        folder.write(block)
    kept = blocks.pop()
    for block in blocks:
        folder.remove(block.key, block.namespace)
    assert folders(folder) == 2 and read(folder, kept) == kept.payload


def test_a_scan_removes_folders_without_blocks(folder: BlockFolder) -> None:
    block = block_of(1)
    folder.write(block)
    (folder._root / "blocks" / "gone" / "ab").mkdir(parents=True)
    assert [file.key for file in folder.scan()] == [block.key]
    assert folders(folder) == 2


def test_a_folder_that_empties_while_a_block_comes_loses_nothing(folder: BlockFolder) -> None:
    """Two keys of one folder: while one is written and read, the other is written and removed."""
    first, second = (make_block(bytes((7, number)) * 16, "tenant", [b"x" * 100]) for number in range(2))
    going_on = threading.Event()
    going_on.set()

    def come_and_go() -> None:
        while going_on.is_set():
            folder.write(second)
            folder.remove(second.key, second.namespace)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(500):
            folder.write(first)
            assert read(folder, first) == first.payload
            folder.remove(first.key, first.namespace)
    finally:
        going_on.clear()
        other.join()
    assert folders(folder) == 0
