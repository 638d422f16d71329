"""KV in host memory and the KV pool: what is offered has the bytes of its tokens, and what comes lies where it should.

Extents that wait to be stored are held, whatever becomes of their sequence, until somebody needs them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.prefix import extend_keys
from kvcache.connector.fetch_cost import FetchCost
from kvcache.connector.prefix_fetch import PrefixFetcher
from kvcache.connector.write_back import BlockMemory, WriteBack
from kvcache.memory.host_copy import Bytes
from kvcache.memory.locations import KVLocations
from kvcache.pool.block import DEFAULT_NAMESPACE, PoolBlock, block_of
from serving.errors import NoRoom
from tests.fakes.sequences import make_sequence
from tests.kvcache.connector.test_prefix_fetch import Reader
from tests.kvcache.connector.test_write_back import Writer
from tests.kvcache.memory.test_locations import LENGTH, PLAN, SPECS, Engine, attended, kv_of, wanted

EXTENT = PLAN.extent_tokens
SIZE = PLAN.block_size


def payload(index: int) -> bytes:
    """The block of this number of the prompt, as the pool keeps it."""
    parts: list[Bytes] = []
    for layer in range(len(SPECS)):
        tokens = [kv_of(layer, position) for position in range(index * SIZE, (index + 1) * SIZE)]
        parts += [np.concatenate(planes).reshape(-1) for planes in zip(*tokens, strict=True)]
    return b"".join(part.tobytes() for part in parts)


class Storing:
    """An engine whose store-back offers what lies on the host."""

    def __init__(self) -> None:
        self.engine = Engine()
        kv, host = self.engine.kv, self.engine.host
        self.writer = Writer()
        blocks = host.blocks
        self.back = WriteBack(
            self.writer,
            BlockMemory.on_device(self.engine.device_kv, kv.allocator),
            threading.RLock(),
            host=BlockMemory(blocks, self.engine.tier.extents, blocks.num_blocks, PLAN.extent_blocks),
        )
        self.engine.kv = KVCacheManager(kv.allocator, "model", self.engine.tier, self.back)
        self.engine.seq.incoming.prefilled_here = True

    @property
    def held(self) -> list[int]:
        assert self.back.host is not None
        return self.back.table(self.back.host)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=30), st.integers(0, 30))
def test_what_is_stored_has_the_bytes_of_its_tokens(counts: list[int], over: int) -> None:
    """Published between any two moves of a step; the sequence may be over before anything is sent."""

    async def store() -> None:
        storing = Storing()
        engine, seq = storing.engine, storing.engine.seq
        for number, count in enumerate(counts):
            engine.go_on(count)
            engine.kv.publish(seq)
            if number == over:
                break
        settled, keys = engine.offload.copied * PLAN.extent_blocks, list(seq.prefix.keys)
        assert len(storing.held) == settled
        engine.kv.release(seq)
        assert engine.tier.unaccounted([], storing.held) == engine.kv.unaccounted([]) == 0
        running = asyncio.create_task(storing.back.run(lambda: False))
        await storing.back.wait_idle()
        running.cancel()
        assert [bytes(block.payload) for block in storing.writer.taken] == [payload(i) for i in range(settled)]
        assert [block.key for block in storing.writer.taken] == keys[:settled]
        assert engine.tier.extents.held == engine.kv.allocator.held == 0

    asyncio.run(store())


async def test_whoever_needs_extents_gets_them() -> None:
    storing = Storing()
    engine, kv = storing.engine, storing.engine.kv
    engine.compute_all()
    kv.publish(engine.seq)
    kv.release(engine.seq)
    assert engine.tier.extents.available < 6 and storing.back.dropped == 0
    another = make_sequence(kv, range(LENGTH))
    kv.open(another)
    assert another.offload is not None and len(another.offload.extents) == 6
    assert storing.held == [] and storing.back.dropped > 0
    with pytest.raises(NoRoom):
        kv.open(make_sequence(kv, range(LENGTH)))
    kv.release(another)
    assert engine.tier.extents.held == kv.allocator.held == 0


def in_pool(engine: Engine, blocks: int) -> dict[bytes, PoolBlock]:
    """The first blocks of the engine's prompt, computed elsewhere."""
    seq = engine.seq
    extend_keys(seq.prefix.keys, seq.prefix.root, seq.tokens, SIZE, upto=blocks * SIZE)
    sizes = [spec.token_bytes * SIZE for spec in SPECS]
    made = [
        block_of(key, DEFAULT_NAMESPACE, sizes, memoryview(payload(i)))
        for i, key in enumerate(seq.prefix.keys[:blocks])
    ]
    return {block.key: block for block in made}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, (LENGTH - 1) // SIZE),
    st.sets(st.tuples(st.integers(0, len(SPECS) - 1), st.integers(0, 16)), max_size=2),
    st.booleans(),
    st.lists(st.integers(1, 24), min_size=9, max_size=9),
)
def test_what_comes_lies_on_the_host_in_whole_extents(
    pooled: int, lost: set[tuple[int, int]], opened: bool, counts: Sequence[int]
) -> None:
    """Then the rest is computed, and attention finds every token."""
    engine = Engine()
    seq, kv = engine.seq, engine.kv
    held = in_pool(engine, pooled)
    if not opened:  # a prompt that waits in no queue yet
        kv.release(seq)
    prefixes = PrefixFetcher(
        Reader(held, lost), kv, KVLocations(engine.device_kv, engine.host, threading.RLock()), FetchCost(), wait=5.0
    )
    begun: list[int] = []
    asyncio.run(prefixes.bring(seq, lambda: begun.append(seq.computed)))
    assert begun == [], "no step may follow it"
    fetched = min(pooled // PLAN.extent_blocks, 6)
    whole = next((i for i in range(fetched * PLAN.extent_blocks) if any(at == i for _, at in lost)), None)
    extents = fetched if whole is None else whole // PLAN.extent_blocks
    if not seq.blocks:
        assert not pooled
        return
    assert seq.offload is not None
    engine.offload = seq.offload
    assert seq.computed == seq.cached == extents * EXTENT and seq.incoming.arrival is None
    assert prefixes.stats.hits == seq.computed and seq.offload.moved == seq.offload.copied == extents
    for count in counts:
        engine.go_on(count)
    engine.compute_all()
    for layer, found in enumerate(attended(engine)):
        assert found == wanted(layer, 0, LENGTH)
    kv.release(seq)
    assert engine.tier.extents.held == kv.allocator.held == 0
