"""The pool as a worker sees it: nodes fail, lie, stall and leave, and its calls never do worse than find less."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.client import PoolClient, batches
from kvcache.pool.links import PoolLink
from serving.errors import Overloaded
from tests.fakes.loop_time import passing_time
from tests.kvcache.pool.nodes import KINDS, PARTS, Cluster, Served, block, content, patient_client

COUNT = 48  # so many that every node has some
BLOCKS = [block(number) for number in range(COUNT)]
KEYS = [one.key for one in BLOCKS]
EVERYTHING = {(number, part): content(number, part) for number in range(COUNT) for part in range(PARTS)}


class Now:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Altered:
    """A link that does otherwise in some calls; `asked` counts all."""

    def __init__(self, link: PoolLink, **ways: Callable[..., Any]):
        self.link = link
        self.ways = ways
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return self.ways.get(name) or getattr(self.link, name)


async def read(
    client: PoolClient,
    keys: Sequence[bytes] = KEYS,
    *,
    found: dict[tuple[int, int], bytes] | None = None,
    **span: int,
) -> dict[tuple[int, int], bytes]:
    """Everything a get brings, by (index, part), as it comes; of each key the parts come in order, and once."""
    found = {} if found is None else found
    reached: dict[int, int] = {}
    async for slab in client.get(keys, **span, parts=PARTS):
        for index, _, data in slab.parts():
            assert slab.part == reached.get(index, slab.part - 1) + 1
            reached[index] = slab.part
            found[index, slab.part] = bytes(data)
    return found


@asynccontextmanager
async def pool(kind: str, nodes: int = 3, **options: Any) -> AsyncIterator[tuple[Cluster, PoolClient]]:
    """Nodes and a client that knows them all. Nothing is left running afterwards."""
    before = asyncio.all_tasks()
    async with Cluster(kind, nodes) as cluster:
        client = patient_client(options.pop("make_link", cluster.link), **options)
        client.set_nodes(cluster.addresses)
        yield cluster, client
        assert client.calls == 0
        async with asyncio.timeout(60):  # a node hears a little later that its caller is gone
            while any(task.get_name().startswith(("get-", "put-", "lookup-")) for task in asyncio.all_tasks() - before):
                await asyncio.sleep(0.001)
        await client.close()


@pytest.mark.parametrize("replication", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_one_client_puts_another_finds_and_reads(kind: str, replication: int) -> None:
    async with pool(kind, replication=replication) as (cluster, client):
        await client.put(BLOCKS)
        assert sorted(client.nodes) == sorted(cluster.addresses)
        other = patient_client(cluster.link, replication=replication)
        other.set_nodes(reversed(cluster.addresses))
        assert await other.lookup(KEYS) == len(KEYS)
        assert await read(other) == EVERYTHING
        assert await read(other, KEYS[5:7], first_part=1, last_part=2) == {
            (0, 1): content(5, 1),
            (1, 1): content(6, 1),
        }
        counts = [served.store.stored for served in cluster.served]
        assert sum(counts) == replication * len(BLOCKS) and min(counts) > 0
        stats = client.stats
        assert (stats.stored, stats.bytes_out) == (sum(counts), sum(counts) * PARTS * 1000)
        assert other.stats.bytes_in == {cluster.kind: COUNT * PARTS * 1000 + 2000} and not other.stats.failures
        await other.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_prefix_ends_where_a_block_is_missing(kind: str) -> None:
    async with pool(kind) as (_, client):
        await client.put([*BLOCKS[:7], *BLOCKS[8:]])
        assert await client.lookup(KEYS) == 7 and await client.lookup(KEYS[8:]) == COUNT - 8
        assert await client.lookup([]) == 0 and await read(client, []) == {}
        found = await read(client)
        assert found == {at: data for at, data in EVERYTHING.items() if at[0] != 7}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_dies_in_the_middle_costs_nothing_with_a_replica(kind: str) -> None:
    async with pool(kind, replication=2) as (cluster, client):
        await client.put(BLOCKS)
        victim = cluster.served[0]
        victim.store.after = 2
        found = {}
        async for slab in client.get(KEYS, parts=PARTS):
            if victim.alive and victim.node.calls:
                await victim.kill()
            for index, _, data in slab.parts():
                assert (index, slab.part) not in found
                found[index, slab.part] = bytes(data)
        assert found == EVERYTHING and not victim.alive
        assert client.stats.failures == {"WorkerLost": 1}
        assert await client.lookup(KEYS) == len(KEYS), "the other replica is asked in the same round"
        assert await read(client) == EVERYTHING


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_replica_only_its_share_is_missing(kind: str) -> None:
    async with pool(kind) as (cluster, client):
        await client.put(BLOCKS)
        await cluster.served[0].kill()
        gone = {KEYS.index(one) for one in KEYS if client.rendezvous.owners(one) == (cluster.served[0].address,)}
        assert gone and await read(client) == {at: data for at, data in EVERYTHING.items() if at[0] not in gone}
        assert await client.lookup(KEYS) == min(gone)


@pytest.mark.parametrize("kind", KINDS)
async def test_with_all_nodes_dead_nothing_is_found_and_nothing_raised(kind: str) -> None:
    async with pool(kind, replication=2, timeout=600.0, clock=Now()) as (cluster, client):
        for served in cluster.served:
            await served.kill()
        async with asyncio.timeout(60):
            assert await client.lookup(KEYS) == 0
            assert await read(client) == {}
            await client.put(BLOCKS)
        assert client.stats.failures == {"WorkerLost": 3} and client.stats.stored == 0


async def test_a_node_that_comes_back_is_found_again() -> None:
    now = Now()
    async with pool("grpc", 1, clock=now) as (cluster, client):
        await cluster.served[0].kill()
        assert await client.lookup(KEYS) == 0
        again = Served("grpc", "again", port=int(cluster.addresses[0].rpartition(":")[2]))
        await again.start()
        await again.node.put(BLOCKS)
        async with asyncio.timeout(60):
            while await client.lookup(KEYS) == 0:
                now.seconds += 60.0
                await asyncio.sleep(0.01)
        assert await read(client) == EVERYTHING
        await again.stop()


async def test_nodes_that_stall_cost_one_timeout_and_are_then_left_alone() -> None:
    async def never(*_: object) -> list[bool]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    now, links = Now(), {}

    async with Cluster("local", 3) as cluster:
        for address in cluster.addresses:
            links[address] = Altered(cluster.link(address), lookup=never)
        client = PoolClient(links.__getitem__, timeout=0.05, clock=now)
        client.set_nodes(cluster.addresses)
        assert await client.lookup(KEYS) == 0
        assert client.stats.failures == {"Timeout": 3}
        asked = [list(link.asked) for link in links.values()]
        assert await client.lookup(KEYS) == 0 and await read(client) == {}
        await client.put(BLOCKS)
        assert [link.asked for link in links.values()] == asked, "nobody was asked again"
        for link in links.values():
            link.ways.clear()
        client.timeout = 10.0
        now.seconds += 1.0
        await asyncio.gather(*(client.lookup(KEYS) for _ in range(5)))
        assert [link.asked.count("lookup") for link in links.values()] == [2, 2, 2], "one caller tries first"
        await client.put(BLOCKS)
        assert await client.lookup(KEYS) == len(KEYS)


async def test_a_stalled_get_goes_on_at_the_replica() -> None:
    async with pool("local", 2, replication=2, timeout=600.0) as (cluster, client):
        await client.put(BLOCKS)
        stalled = cluster.served[0]
        stalled.store.after = 1
        of_the_other = PARTS * sum(client.rendezvous.owners(one)[0] != stalled.address for one in KEYS)
        found: dict[tuple[int, int], bytes] = {}
        let_pass, reading = passing_time(), asyncio.create_task(read(client, found=found))
        async with asyncio.timeout(60):
            # What the other has is there, and what came before the stall has been taken: nothing moves any more.
            while not stalled.store.reached.is_set() or client.calls > 1 or len(found) <= of_the_other:
                await asyncio.sleep(0)
        let_pass(601.0)
        assert await reading == EVERYTHING
        assert client.stats.failures == {"Timeout": 1}
        stalled.store.gate.set()


def flipped(slab: Slab, at: int) -> Slab:
    payload = bytearray(slab.payload)
    payload[at] ^= 1
    return replace(slab, payload=bytes(payload))


@pytest.mark.parametrize("replication", [1, 2])
async def test_a_corrupt_piece_is_missing_there_and_taken_from_the_next(replication: int) -> None:
    async with Cluster("local", 2) as cluster:
        links = {address: Altered(cluster.link(address)) for address in cluster.addresses}
        client = patient_client(links.__getitem__, replication=replication)
        client.set_nodes(cluster.addresses)
        await client.put(BLOCKS)
        liar = cluster.addresses[0]
        mine = [number for number in range(COUNT) if client.rendezvous.owners(KEYS[number])[0] == liar]

        async def lying(keys: Sequence[bytes], first: int, last: int) -> AsyncIterator[Slab]:
            async for slab in cluster.link(liar).get(keys, first, last):
                yield flipped(slab, 1500) if slab.part == 1 else slab

        links[liar].ways["get"] = lying
        found = await read(client)
        missing = {(mine[1], part) for part in range(1, PARTS)} if replication == 1 else set()
        assert found == {at: data for at, data in EVERYTHING.items() if at not in missing}
        assert client.stats.corrupt == 1 and not client.stats.failures


async def test_a_node_that_refuses_is_counted_but_not_left_alone() -> None:
    async def full(blocks: Sequence[PoolBlock]) -> int:
        raise Overloaded("full")

    async with Cluster("local", 2) as cluster:
        links = {address: Altered(cluster.link(address), put=full) for address in cluster.addresses}
        client = patient_client(links.__getitem__)
        client.set_nodes(cluster.addresses)
        await client.put(BLOCKS)
        assert client.stats.failures == {"Overloaded": 2} and client.stats.stored == 0
        for link in links.values():
            link.ways.clear()
        await client.put(BLOCKS)
        assert client.stats.stored == len(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
async def test_leaving_a_get_in_the_middle_leaves_nothing_behind(kind: str) -> None:
    async with pool(kind) as (cluster, client):
        await client.put(BLOCKS)
        async with aclosing(client.get(KEYS, parts=PARTS)) as slabs:
            await anext(slabs)
        assert client.calls == 0
        for served in cluster.served:
            served.store.after = 0
        reading = asyncio.create_task(read(client))
        while client.calls < 3:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert client.calls == 0


async def test_cancelling_a_lookup_or_a_put_leaves_nothing_behind() -> None:
    async with Cluster("local", 2) as cluster:
        started = asyncio.Event()

        async def never(*_: object) -> int:
            started.set()
            return await asyncio.Event().wait()

        client = patient_client(lambda address: Altered(cluster.link(address), put=never, lookup=never))
        client.set_nodes(cluster.addresses)
        before = asyncio.all_tasks()
        for work in (client.lookup(KEYS), client.put(BLOCKS)):
            started.clear()
            task: asyncio.Task[Any] = asyncio.create_task(work)  # type: ignore[arg-type]
            await started.wait()
            task.cancel()
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
            assert client.calls == 0 and asyncio.all_tasks() == before


async def test_the_link_of_a_node_that_left_is_closed_once_unused() -> None:
    closed: list[str] = []

    async with Cluster("local", 2) as cluster:

        def link(address: str) -> Altered:
            async def close() -> None:
                closed.append(address)

            return Altered(cluster.link(address), close=close)

        client = patient_client(link)
        stays, leaves = cluster.addresses
        client.set_nodes(cluster.addresses)
        await client.put(BLOCKS)
        cluster.served[1].store.after = 1
        slabs = client.get(KEYS, parts=PARTS)
        await anext(slabs)
        client.set_nodes([stays])
        await asyncio.sleep(0)
        assert closed == [] and client.calls >= 1, "the get in progress is let go on"
        await slabs.aclose()
        await asyncio.sleep(0)
        assert closed == [leaves] and client.calls == 0
        assert await client.lookup(KEYS) < len(KEYS)
        await client.close()
        assert closed == [leaves, stays] and client.nodes == ()


async def test_a_block_that_only_one_replica_has_is_found_and_read() -> None:
    async with pool("local", 2, replication=2) as (cluster, client):
        for number, one in enumerate(BLOCKS):
            await cluster.served[number % 2].node.put([one])
        assert await client.lookup(KEYS) == len(KEYS)
        assert await read(client) == EVERYTHING


def test_a_put_goes_in_pieces_of_bounded_size() -> None:
    big = [block(number, parts=1, size=3 << 20) for number in range(5)]
    assert [len(batch) for batch in batches(big)] == [2, 2, 1]
    assert [len(batch) for batch in batches([block(9, parts=1, size=9 << 20), block(1)])] == [1, 1]
    assert list(batches([])) == []
