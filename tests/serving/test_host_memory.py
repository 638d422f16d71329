"""Pieces of large mappings: zeros that are nobody else's, in huge pages if there are any, given back when unused."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from serving import host_memory
from serving.host_memory import LEAST_HUGE, PAGE, HostMemory, populate

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str] | None:
    """What the kernel notes of the mapping that has this address; None: there is none."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE)[1:]:
        first, last = (int(end, 16) for end in mapping.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return mapping.partition("VmFlags:")[2].split()
    return None


@pytest.mark.parametrize("counts", [[1, PAGE, PAGE + 1, 3 * PAGE], [5 * PAGE, 40, 0, 9 * PAGE, 7]])
def test_pieces_are_zeros_on_pages_of_their_own(counts: list[int]) -> None:
    memory = HostMemory(4 * PAGE)
    pieces = [memory.take(count) for count in counts]
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        assert piece.shape == (count,) and not piece.any() and (count == 0 or piece.data_ptr() % PAGE == 0)
        piece.fill_(number + 1)
    assert all((piece == number + 1).all() for number, piece in enumerate(pieces))
    pages = [
        page
        for piece in pieces
        for page in range(piece.data_ptr() // PAGE, -(-(piece.data_ptr() + len(piece)) // PAGE))
    ]
    assert len(pages) == len(set(pages)) == sum(-(-count // PAGE) for count in counts)


def test_threads_get_different_pieces() -> None:
    memory = HostMemory(16 * PAGE)
    with ThreadPoolExecutor(8) as threads:
        pieces = list(threads.map(lambda _: memory.take(PAGE), range(500)))
    assert len({piece.data_ptr() for piece in pieces}) == 500


@pytest.mark.skipif(not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE")), reason="tells of mappings on Linux only")
@pytest.mark.parametrize("count", [100, LEAST_HUGE])
@pytest.mark.parametrize(("step", "huge"), [(LEAST_HUGE, True), (LEAST_HUGE - PAGE, False)])
def test_large_mappings_ask_for_huge_pages(count: int, step: int, huge: bool) -> None:
    piece = HostMemory(step).take(count)
    if not (Path("/sys/kernel/mm") / "transparent_hugepage").exists():
        pytest.skip("a kernel without huge pages")
    flags = flags_at(piece.data_ptr())
    assert flags is not None and ("hg" in flags) == (huge or count > step)


@pytest.mark.skipif(not SMAPS.exists(), reason="tells of mappings on Linux only")
def test_a_mapping_is_given_back_once_no_piece_is_used() -> None:
    memory = HostMemory(1 << 30)
    first, second = memory.take(10), memory.take(1 << 29).view(torch.int32)
    at = first.data_ptr()
    del memory, first
    assert flags_at(at) is not None and second.sum() == 0
    del second
    assert flags_at(at) is None


# ---- pages before they are written ---------------------------------------------------------------------------------


def resident(address: int, count: int) -> bool:
    """True if all of these bytes have pages."""
    first = address // PAGE * PAGE
    pages = (ctypes.c_ubyte * (-(-(address + count - first) // PAGE)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(address + count - first), pages) == 0
    return all(page & 1 for page in pages)


def can_populate() -> bool:
    piece = HostMemory(PAGE).take(1)
    try:
        populate(piece.data_ptr(), 1)
    except OSError:
        return False
    return True


needs_populating = pytest.mark.skipif(not can_populate(), reason="a kernel without MADV_POPULATE_WRITE")


@needs_populating
def test_memory_has_pages_and_keeps_what_it_holds() -> None:
    piece = HostMemory(64 * PAGE).take(64 * PAGE)  # too little for huge pages
    piece[20 * PAGE + 5] = 9
    assert not resident(piece.data_ptr() + 9 * PAGE, PAGE)
    populate(piece.data_ptr() + 10 * PAGE + 100, 20 * PAGE)
    assert resident(piece.data_ptr() + 10 * PAGE, 21 * PAGE), "pages that are named in part as well"
    assert not resident(piece.data_ptr() + 9 * PAGE, PAGE) and not resident(piece.data_ptr() + 31 * PAGE, PAGE)
    assert piece[20 * PAGE + 5] == 9 and piece.count_nonzero() == 1


@needs_populating
def test_what_others_write_meanwhile_stays() -> None:
    piece = HostMemory(64 * LEAST_HUGE).take(64 * LEAST_HUGE)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(piece.fill_, 3)
        for first in range(0, len(piece), LEAST_HUGE):
            populate(piece.data_ptr() + first, LEAST_HUGE)
        writing.result()
    assert (piece == 3).all()


def test_a_kernel_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = HostMemory(PAGE).take(PAGE)
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 99)  # as unknown to this kernel as 23 to one before 5.14
    with pytest.raises(OSError, match="Invalid argument" if sys.platform == "linux" else ""):
        populate(piece.data_ptr(), PAGE)
    monkeypatch.setattr(sys, "platform", "darwin")  # whose madvise may mean something else by the same number
    with pytest.raises(OSError, match="not implemented"):
        populate(piece.data_ptr(), PAGE)


@needs_populating
def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(OSError, match="allocate memory"):
        populate(1 << 46, PAGE)
