"""Ten thousand random corruptions of blocks, in memory, on disk, on the way in and on the way out.

Every one is found and counted, and not one byte that its maker did not write comes out anywhere.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.pool.block import DIGEST_BYTES, PoolBlock, Slab
from kvcache.pool.links import PoolLink
from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from serving.errors import CorruptChunk
from tests.kvcache.corruptions import BYTE_HARM, flipped
from tests.kvcache.pool.nodes import KINDS, Cluster, patient_client
from tests.kvcache.pool.storage import block_of, drained, key_of, whole_ones

pytestmark = pytest.mark.thorough

EACH = 2500  # corruptions a campaign; there are four and more
HARMS = list(BYTE_HARM.values())
SAME_LENGTH = [BYTE_HARM[name] for name in ("a bit", "some bits", "displaced")]


@pytest.fixture(autouse=True)
def few_words(caplog: pytest.LogCaptureFixture) -> None:
    """Each corruption is told in the log, which nobody wants to read here."""
    caplog.set_level("ERROR", logger="millrace")


def harmed_block(block: PoolBlock, other: PoolBlock, chance: random.Random) -> PoolBlock:
    """The block with one thing wrong."""
    match chance.randrange(5):
        case 0:
            return replace(block, payload=chance.choice(HARMS)(block.payload, chance))
        case 1:
            return replace(block, digests=chance.choice(HARMS)(block.digests, chance))
        case 2:
            return replace(block, payload=other.payload, digests=other.digests, sizes=other.sizes)
        case 3:
            return replace(block, key=flipped(block.key, chance))
        case _:
            sizes = list(block.sizes)
            sizes[chance.randrange(len(sizes))] += chance.choice((-1, 1, 7))
            return replace(block, sizes=tuple(sizes))


def test_in_memory() -> None:
    """A quarter of the blocks is harmed at a time; the others come out whole."""
    chance = random.Random(1)
    found = 0
    while found < EACH:
        store = BlockStore(StoreConfig(ram_bytes=16 << 20))
        blocks = [block_of(number) for number in range(400)]
        store.put(blocks)
        harmed = set(chance.sample(range(400), 100))
        ram = store._tiers.ram
        for number in harmed:
            payload = bytes(chance.choice(SAME_LENGTH)(blocks[number].payload, chance))
            record = ram.get(key_of(number))
            assert record is not None
            object.__setattr__(record.block, "payload", payload)
        assert whole_ones(store, blocks) == [number not in harmed for number in range(400)]
        assert sum(stat.corrupt for stat in store.tier_stats().values()) == len(harmed)
        assert store.lookup([key_of(number) for number in harmed]) == [False] * len(harmed)
        found += len(harmed)
        store.close()


def test_on_disk(tmp_path: Path) -> None:
    chance = random.Random(2)
    store = BlockStore(StoreConfig(disk_path=tmp_path, disk_bytes=16 << 20, backlog=1000))
    assert store._folder is not None
    found = 0
    while found < EACH:
        blocks = [block_of(number) for number in range(250)]
        store.put(blocks)
        drained(store)
        paths = {number: store._folder._path(key_of(number), "default") for number in range(250)}
        harmed = set(chance.sample(range(250), 125))
        contents = {number: path.read_bytes() for number, path in paths.items()}
        for number in harmed:
            if chance.random() < 0.2:  # another block's file
                data = contents[(number + 1) % 250]
            else:
                data = chance.choice(HARMS)(contents[number], chance)
            paths[number].write_bytes(data)
        before = sum(stat.corrupt for stat in store.tier_stats().values())
        assert whole_ones(store, blocks) == [number not in harmed for number in range(250)]
        assert sum(stat.corrupt for stat in store.tier_stats().values()) - before == len(harmed)
        found += len(harmed)
    store.close()


def test_on_the_way_in() -> None:
    chance = random.Random(3)
    store = BlockStore(StoreConfig(ram_bytes=16 << 20))
    blocks = [block_of(number) for number in range(50)]
    for _ in range(EACH):
        block, other = chance.sample(blocks, 2)
        refused = store.refused
        with pytest.raises(CorruptChunk):
            store.put([harmed_block(block, other, chance)])
        assert store.refused == refused + 1
    assert store.keys() == []
    store.close()


class Lying:
    """A link to a node that harms one slab of each get."""

    def __init__(self, link: PoolLink, chance: random.Random):
        self.link = link
        self.chance = chance
        self.seen: list[Slab] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.link, name)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncIterator[Slab]:
        slabs = [slab async for slab in self.link.get(keys, first_part, last_part)]
        wrong = self.chance.randrange(len(slabs))
        for number, slab in enumerate(slabs):
            yield self._harmed(slab) if number == wrong else slab
        self.seen = [*slabs, *self.seen][:20]

    def _harmed(self, slab: Slab) -> Slab:
        chance = self.chance
        replays = [old for old in self.seen if old.payload != slab.payload]
        match chance.randrange(6):
            case 0:
                return replace(slab, payload=chance.choice(HARMS)(slab.payload, chance))
            case 1:
                return replace(slab, digests=chance.choice(HARMS)(slab.digests, chance))
            case 2:
                return replace(slab, part=slab.part + chance.choice((-1, 1, 5)))
            case 3 if len(slab.indices) > 1:  # pieces of two blocks have changed places
                order = list(slab.indices)
                order[0], order[1] = order[1], order[0]
                return replace(slab, indices=tuple(order))
            case 4 if replays:
                return chance.choice(replays)
            case _:
                at = chance.randrange(len(slab.digests) // DIGEST_BYTES) * DIGEST_BYTES
                digests = bytearray(slab.digests)
                digests[at] ^= 1
                return replace(slab, digests=bytes(digests))


@pytest.mark.parametrize("kind", KINDS)
async def test_on_the_way_out(kind: str) -> None:
    """Whatever a node sends, what the client hands on is what somebody wrote under that key, in that place."""
    chance = random.Random(4)
    blocks = [block_of(number) for number in range(40)]
    async with Cluster(kind, 1) as cluster:
        client = patient_client(lambda address: Lying(cluster.link(address), chance))  # type: ignore[arg-type, return-value]
        client.set_nodes(cluster.addresses)
        await client.put(blocks)
        for count in range(EACH if kind == "local" else EACH // 5):
            wanted = chance.sample(blocks, chance.randint(1, 6))
            parts = 0
            async for slab in client.get([block.key for block in wanted], parts=3):
                for index, _, data in slab.parts():
                    assert data == wanted[index].part(slab.part), "a byte that nobody wrote"
                    parts += 1
            assert parts < 3 * len(wanted), "the harm went unnoticed"
            assert client.stats.corrupt > count, "the harm was not counted"
        await client.close()
