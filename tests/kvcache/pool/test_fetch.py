"""One get over nodes that drop keys, corrupt pieces, send nonsense or die: all that is right comes, once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.block import Slab, part_digest
from kvcache.pool.fetch import Fetch
from tests.kvcache.pool.nodes import content, key

PARTS = 4
NUMBERS = range(3)
KEYS = [key(number) for number in NUMBERS]
NODES = ("a", "b", "c")


@dataclass
class Script:
    """What a node does: of each key, the part at which it leaves it out, and the part it sends wrong."""

    until: dict[int, int] = field(default_factory=dict)
    wrong: dict[int, int] = field(default_factory=dict)
    slabs: int = 99  # until it dies


def part_of(number: int, part: int, *, wrong: bool = False) -> bytes:
    data = content(number, part, 50)
    return data[:-1] + bytes([data[-1] ^ 1]) if wrong else data


class Nodes:
    """Streams of slabs as the scripts say; `asked` are the calls, by node."""

    def __init__(self, scripts: dict[str, Script]):
        self.scripts = scripts
        self.asked: list[tuple[str, tuple[int, ...], int, int]] = []

    async def stream(self, address: str, keys: Sequence[bytes], first: int, last: int) -> AsyncGenerator[Slab, None]:
        script = self.scripts[address]
        numbers = [KEYS.index(one) for one in keys]
        self.asked.append((address, tuple(numbers), first, last))
        for part in range(first, min(last, first + script.slabs)):
            await asyncio.sleep(0)
            here = [place for place, number in enumerate(numbers) if part < script.until.get(number, PARTS)]
            sent = [part_of(numbers[place], part, wrong=script.wrong.get(numbers[place]) == part) for place in here]
            right = [part_digest(keys[place], part, PARTS, part_of(numbers[place], part)) for place in here]
            if here:
                yield Slab(
                    part=part,
                    indices=tuple(here),
                    sizes=tuple(map(len, sent)),
                    digests=b"".join(right),
                    payload=b"".join(sent),
                )


async def collect(fetch: Fetch) -> dict[int, list[tuple[int, bytes]]]:
    """(part, bytes) of every key, as they came."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    async for slab in fetch.slabs():
        for index, digest, data in slab.parts():
            assert part_digest(KEYS[index], slab.part, PARTS, data) == digest
            found.setdefault(index, []).append((slab.part, bytes(data)))
    return found


SCRIPTS = st.builds(
    Script,
    until=st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, PARTS)),
    wrong=st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, PARTS - 1), max_size=2),
    slabs=st.integers(0, PARTS) | st.just(99),
)
ORDERS = st.permutations(NODES).flatmap(lambda order: st.integers(0, 3).map(lambda count: order[:count]))


@given(
    st.fixed_dictionaries(dict.fromkeys(NODES, SCRIPTS)),
    st.lists(ORDERS, min_size=3, max_size=3),
    st.integers(0, PARTS - 1),
    st.integers(1, PARTS),
)
def test_every_piece_that_some_owner_sends_comes_once_and_in_order(
    scripts: dict[str, Script], owners: list[list[str]], first: int, last: int
) -> None:
    nodes = Nodes(scripts)
    fetch = Fetch(KEYS, owners, first, last, PARTS, nodes.stream)
    found = asyncio.run(collect(fetch))
    wrong = 0
    for number in NUMBERS:
        reached = first
        for address in owners[number]:
            script, begin = scripts[address], reached
            if begin >= last:
                break
            end = min(last, script.until.get(number, PARTS), begin + script.slabs)
            bad = script.wrong.get(number, PARTS)
            reached = max(begin, min(end, bad if bad >= begin else PARTS))
            wrong += begin <= bad < end
        expected = [(part, part_of(number, part)) for part in range(first, reached)]
        assert found.get(number, []) == expected, (number, nodes.asked)
    assert fetch.corrupt == wrong


def test_a_slab_that_contradicts_itself_counts_as_corrupt() -> None:
    async def one(bad: Slab) -> tuple[dict[int, list[tuple[int, bytes]]], int]:
        nodes = Nodes({"a": Script(slabs=1), "b": Script()})

        async def stream(address: str, keys: Sequence[bytes], first: int, last: int) -> AsyncGenerator[Slab, None]:
            if address == "a":
                yield bad
            else:
                async for slab in nodes.stream(address, keys, first, last):
                    yield slab

        fetch = Fetch(KEYS[:1], [["a", "b"]], 0, PARTS, PARTS, stream)
        return await collect(fetch), fetch.corrupt

    data = part_of(0, 0)
    digest = part_digest(KEYS[0], 0, PARTS, data)
    good = Slab(part=0, indices=(0,), sizes=(50,), digests=digest, payload=data)
    whole = {0: [(part, part_of(0, part)) for part in range(PARTS)]}
    assert asyncio.run(one(good)) == (whole, 0)
    for wrong in (
        replace(good, indices=(1,)),
        replace(good, indices=(0, 0)),
        replace(good, sizes=(49,)),
        replace(good, sizes=()),
        replace(good, digests=digest[:-1]),
        replace(good, payload=data + b"x"),
        replace(good, indices=()),
    ):
        found, corrupt = asyncio.run(one(wrong))
        assert found == whole and corrupt >= 1, wrong
    for misplaced in (replace(good, part=1), replace(good, part=9)):
        assert asyncio.run(one(misplaced))[0] == whole, misplaced


async def test_a_reader_that_is_slow_holds_the_senders_back() -> None:
    sent = 0

    async def stream(address: str, keys: Sequence[bytes], first: int, last: int) -> AsyncGenerator[Slab, None]:
        nonlocal sent
        for part in range(first, last):
            data = content(0, part, 10)
            sent += 1
            yield Slab(
                part=part, indices=(0,), sizes=(10,), digests=part_digest(keys[0], part, last, data), payload=data
            )

    fetch = Fetch(KEYS[:1], [["a"]], 0, 100, 100, stream)
    slabs = fetch.slabs()
    await anext(slabs)
    before = -1
    while before != sent:  # until nothing moves
        before = sent
        await asyncio.sleep(0.02)
    assert sent < 10
    await slabs.aclose()
