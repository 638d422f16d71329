"""Pages of KV before its first request: which, how many, that requests go before, and that nothing is written."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcache.memory import early_pages
from kvcache.memory.device import DeviceKV
from kvcache.memory.early_pages import PARTS_OF_UNUSED, PAUSE, EarlyPages, in_turn
from serving.background import BackgroundTasks
from serving.host_memory import PAGE, huge_page
from serving.kvspec import gqa
from serving.rank_group.shared_planes import SharedPlanes
from tests.fakes.loop_time import passing_time
from tests.serving.test_host_memory import needs_populating, resident

PLENTY = 1 << 50  # bytes
HANGS = 60.0  # seconds


# ---- which ---------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(first=st.integers(0, 40), sizes=SIZES, gaps=st.lists(st.integers(0, 9), min_size=6), most=st.integers(0, 400))
def test_pages_come_in_turn_and_as_many_as_may(first: int, sizes: list[int], gaps: list[int], most: int) -> None:
    page, planes = 8, list[range]()
    for size, gap in zip(sizes, gaps, strict=False):
        planes.append(range(first + gap, first + gap + size))
        first = planes[-1].stop
    every, found = list(in_turn(planes, page, PLENTY)), list(in_turn(planes, page, most))
    assert sorted(at for piece in every for at in piece) == sorted(at for plane in planes for at in plane)
    assert found == every[: len(found)], "those that come first"
    pages = {piece.start // page for piece in found}
    assert len(pages) * page <= most and all(len({at // page for at in piece}) == 1 for piece in found)
    rest = every[len(found) :]
    assert not rest or len(pages | {rest[0].start // page}) * page > most, "as many as are allowed"
    turns = [piece.start // page - plane.start // page for piece in every for plane in planes if piece.start in plane]
    assert turns == sorted(turns), "the beginnings of all planes first"


# ---- when ----------------------------------------------------------------------------------------------------------


class Memory:
    """Stands for the kernel's: counts what it is asked for, and calls `then` with the count, in the thread."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.then: Callable[[int], None] = lambda _: None

    def touch(self, address: int, count: int) -> None:
        self.asked.append(count)
        self.then(len(self.asked))


@pytest.fixture
def planes() -> list[Tensor]:
    return [torch.empty(5 * huge_page(), dtype=torch.uint8) for _ in range(2)]


@pytest.fixture
async def background() -> AsyncIterator[BackgroundTasks]:
    tasks = BackgroundTasks()
    yield tasks
    await tasks.stop()
    assert not tasks.restarts


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS):
        while not true():
            await asyncio.sleep(0.001)


async def pause_over(let_pass: Callable[[float], None]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)  # it begins to wait
    let_pass(PAUSE)


def whole(memory: Memory, planes: Sequence[Tensor]) -> bool:
    return sum(memory.asked) == sum(plane.nbytes for plane in planes)


async def test_a_start_goes_before(planes: list[Tensor], background: BackgroundTasks) -> None:
    memory, let_pass = Memory(), passing_time()
    background.start("kv-pages", EarlyPages(planes, lambda: True, touch=memory.touch, unused=lambda: PLENTY).run)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not memory.asked, "whoever starts beside it has the cores to itself"
    await pause_over(let_pass)
    await until(lambda: whole(memory, planes))


async def test_requests_go_before(planes: list[Tensor], background: BackgroundTasks) -> None:
    memory, let_pass, requests, looks = Memory(), passing_time(), [False], 0

    def come(count: int) -> None:
        if count == 3:
            requests[0] = True

    def idle() -> bool:
        nonlocal looks
        looks += 1
        return not requests[0]

    memory.then = come
    background.start("kv-pages", EarlyPages(planes, idle, touch=memory.touch, unused=lambda: PLENTY).run)
    await pause_over(let_pass)
    await until(lambda: requests[0])
    for turn in range(1, 4):  # it looks again and again, and does nothing
        await pause_over(let_pass)
        await until(lambda least=4 + turn: looks >= least or len(memory.asked) > 3)  # type: ignore[misc]
    assert len(memory.asked) == 3
    requests[0] = False
    await pause_over(let_pass)
    await until(lambda: whole(memory, planes))


async def test_it_ends_with_its_worker(planes: list[Tensor]) -> None:
    memory, let_pass, background = Memory(), passing_time(), BackgroundTasks()
    begun, goes_on = threading.Event(), threading.Event()

    def hang(count: int) -> None:
        if count == 3:
            begun.set()
            goes_on.wait()

    memory.then = hang
    background.start("kv-pages", EarlyPages(planes, lambda: True, touch=memory.touch, unused=lambda: PLENTY).run)
    await pause_over(let_pass)
    await until(begun.is_set)
    await background.stop()  # which does not wait for the thread
    goes_on.set()
    await pause_over(let_pass)
    for _ in range(20):
        await asyncio.to_thread(lambda: None)
    assert len(memory.asked) == 3
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "kv-pages"]


async def test_a_kernel_that_cannot_is_left_alone(
    planes: list[Tensor], background: BackgroundTasks, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(count: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    memory, let_pass = Memory(), passing_time()
    memory.then = refuse
    pages = EarlyPages(planes, lambda: True, touch=memory.touch, unused=lambda: PLENTY)
    with caplog.at_level(logging.INFO, "kvcache.memory.early_pages"):
        running = asyncio.create_task(pages.run())
        await pause_over(let_pass)
        await running
    assert len(memory.asked) == 1 and pages.bytes == 0
    assert "KV gets its pages as it is written: [Errno 22]" in caplog.text


async def test_a_part_of_what_is_left_is_taken(planes: list[Tensor]) -> None:
    memory, let_pass, page = Memory(), passing_time(), huge_page()

    def unused() -> int:
        """Others take as much at the same time."""
        return PARTS_OF_UNUSED * 6 * page - 2 * sum(memory.asked)

    pages = EarlyPages(planes, lambda: True, touch=memory.touch, unused=unused)
    running = asyncio.create_task(pages.run())
    await pause_over(let_pass)
    await running
    assert 4 * page < pages.bytes == sum(memory.asked) <= 5 * page  # past four, one more is too much


async def test_pages_that_a_request_would_wait_long_for_are_left_alone(
    planes: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm64 kernel with pages of 64 KiB has huge ones of 512 MiB."""
    memory, let_pass = Memory(), passing_time()
    monkeypatch.setattr(early_pages, "huge_page", lambda: 512 << 20)
    running = asyncio.create_task(EarlyPages(planes, lambda: True, touch=memory.touch, unused=lambda: PLENTY).run())
    await pause_over(let_pass)
    await running
    assert not memory.asked


async def test_no_more_than_the_most(planes: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    memory, let_pass = Memory(), passing_time()
    monkeypatch.setattr(early_pages, "MOST", 5 * huge_page())
    running = asyncio.create_task(EarlyPages(planes, lambda: True, touch=memory.touch, unused=lambda: PLENTY).run())
    await pause_over(let_pass)
    await running
    assert 3 * huge_page() < sum(memory.asked) <= 5 * huge_page()


# ---- for real ------------------------------------------------------------------------------------------------------


@needs_populating
@pytest.mark.parametrize("shared", [False, True], ids=["own", "of all ranks"])
async def test_kv_has_pages_and_keeps_what_it_holds(shared: bool) -> None:
    layout = ([gqa(2, 64, "bfloat16")] * 3, 512, 16)
    kv = SharedPlanes(*layout) if shared else DeviceKV(*layout)
    planes = [plane for layer in kv.planes for plane in layer]
    planes[1][40] = 7.0  # a block in use
    assert not all(resident(plane.data_ptr(), plane.nbytes) for plane in planes)
    let_pass = passing_time()
    pages = EarlyPages(planes, lambda: True, unused=lambda: PLENTY)
    running = asyncio.create_task(pages.run())
    await pause_over(let_pass)
    await running
    assert pages.bytes == sum(plane.nbytes for plane in planes) > 6 * PAGE
    assert all(resident(plane.data_ptr(), plane.nbytes) for plane in planes)
    assert (planes[1][40] == 7.0).all() and sum(int(plane.count_nonzero()) for plane in planes) == planes[1][40].numel()
