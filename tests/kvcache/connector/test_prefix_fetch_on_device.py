"""Prefixes from the pool to a device: threads write them, to blocks that are nobody else's until they have."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvcache.connector.block_io import read_blocks
from kvcache.memory.device import DeviceKV
from kvcache.memory.kv_copies import HostCopies
from tests.fakes.sequences import make_sequence
from tests.kvcache.connector.test_prefix_fetch import SIZE, SPECS, Reader, World, in_pool


@pytest.mark.parametrize("ends", [False, True])
async def test_on_a_device_slabs_are_written_in_threads_into_blocks_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Even if the sequence ends while one is written; the event loop goes on meanwhile."""
    prompt = list(range(4 * SIZE + 1))
    held, world = in_pool(prompt, 4), World()
    seq = make_sequence(world.kv, prompt)
    loop, put, threads = asyncio.get_running_loop(), HostCopies.put, []

    def watched(self: HostCopies, *args: Any) -> None:
        threads.append(threading.current_thread())
        assert not world.locations.lock._is_owned()  # type: ignore[attr-defined]

        async def end() -> None:
            seq.ended = True
            with world.locations.lock:
                world.kv.release(seq)

        if ends:
            asyncio.run_coroutine_threadsafe(end(), loop).result(20)
            assert world.blocks.held == 4, "until it is written"
        put(self, *args)

    monkeypatch.setattr(HostCopies, "put", watched)
    monkeypatch.setattr(DeviceKV, "in_host_memory", False)
    async with asyncio.timeout(60):
        await world.prefixes(Reader(held, set())).bring(seq)
    assert threads and threading.current_thread() not in threads and len(threads) == (1 if ends else len(SPECS))
    assert world.blocks.held == (0 if ends else len(seq.blocks)) and seq.computed == (0 if ends else 4 * SIZE)
    assert world.kv.kept == []
    for block, key in zip(seq.blocks, seq.prefix.keys, strict=False):
        assert read_blocks(world.device_kv, [block], [key], "default") == [held[key]]
    world.kv.release(seq)


async def test_a_fetch_that_is_cancelled_twice_ends_when_its_thread_has_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its timeout, and by who wants it over: others write to its blocks next."""
    prompt = list(range(4 * SIZE + 1))
    held, world = in_pool(prompt, 4), World()
    seq = make_sequence(world.kv, prompt)
    loop, put, begun, may = asyncio.get_running_loop(), HostCopies.put, asyncio.Event(), threading.Event()

    def slow(self: HostCopies, *args: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert may.wait(60)
        put(self, *args)

    monkeypatch.setattr(HostCopies, "put", slow)
    monkeypatch.setattr(DeviceKV, "in_host_memory", False)
    async with asyncio.timeout(60):
        bringing = asyncio.create_task(world.prefixes(Reader(held, set())).bring(seq))
        await begun.wait()
        try:
            for _ in range(2):
                bringing.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not bringing.done() and len(world.kv.kept) == 1, "it still writes"
        finally:
            may.set()
        await asyncio.wait([bringing])
    assert bringing.cancelled() and world.kv.kept == [] and seq.computed == 0
    world.kv.release(seq)
    assert world.blocks.held == 0
