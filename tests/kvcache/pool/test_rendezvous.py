"""Rendezvous hashing: fair shares, and no key moves but those of the node that came or went."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.rendezvous import RendezvousHash
from tests.kvcache.pool.nodes import key

ADDRESSES = st.lists(st.text("abc:012", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
KEYS = [key(number) for number in range(60)]


@given(ADDRESSES, st.randoms(), st.integers(1, 4))
def test_the_order_of_nodes_does_not_matter(nodes: list[str], random: st.DataObject, replication: int) -> None:
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ring, other = RendezvousHash(nodes), RendezvousHash([*shuffled, nodes[0]])
    assert all(ring.owners(one, replication) == other.owners(one, replication) for one in KEYS)


@given(ADDRESSES, st.integers(1, 8))
def test_owners_are_distinct_and_as_many_as_asked_for(nodes: list[str], replication: int) -> None:
    for one in KEYS:
        owners = RendezvousHash(nodes).owners(one, replication)
        assert len(owners) == len(set(owners)) == min(replication, len(nodes)) and set(owners) <= set(nodes)
        assert owners[0] == RendezvousHash(nodes).owners(one)[0], "one replica more changes nothing about the first"


@given(ADDRESSES, st.integers(1, 3))
def test_a_node_that_comes_takes_its_share_and_moves_nothing_else(nodes: list[str], replication: int) -> None:
    before, after = RendezvousHash(nodes), RendezvousHash([*nodes, "new"])
    for one in KEYS:
        owners = after.owners(one, replication)
        kept = tuple(owner for owner in owners if owner != "new")
        assert kept == before.owners(one, replication)[: len(kept)]


@given(ADDRESSES, st.integers(1, 3))
def test_a_node_that_goes_leaves_its_keys_to_the_next(nodes: list[str], replication: int) -> None:
    before, after = RendezvousHash(nodes), RendezvousHash(nodes[1:])
    for one in KEYS:
        ranking = [node for node in before.owners(one, len(nodes)) if node != nodes[0]]
        assert after.owners(one, replication) == tuple(ranking[:replication])


def test_shares_are_fair() -> None:
    nodes = [f"10.0.0.{number}:8200" for number in range(5)]
    ring = RendezvousHash(nodes)
    first = Counter(ring.owners(key(number))[0] for number in range(5000))
    both = Counter(owner for number in range(5000) for owner in ring.owners(key(number), 2))
    assert all(850 < first[node] < 1150 for node in nodes), first
    assert all(1750 < both[node] < 2250 for node in nodes), both


def test_nobody_owns_anything_where_nobody_is() -> None:
    assert RendezvousHash().owners(key(0)) == RendezvousHash().owners(key(0), 2) == ()


def test_a_node_owns_by_its_name_wherever_it_is_reached() -> None:
    before, after = RendezvousHash(["a@h:1", "b@h:2", "c@h:3"]), RendezvousHash(["a@h:1", "b@elsewhere:9", "c@h:3"])
    moved = {"h:2": "elsewhere:9"}
    for one in KEYS:
        assert after.owners(one, 2) == tuple(moved.get(owner, owner) for owner in before.owners(one, 2))


def test_a_node_written_twice_is_one_node() -> None:
    named = RendezvousHash(["a@h:1", "b@h:2"])
    assert named.nodes == ("h:1", "h:2")
    for nodes in (["h:1", "a@h:1", "b@h:2"], ["b@h:2", "a@h:1", "h:1"]):
        assert [RendezvousHash(nodes).owners(one) for one in KEYS] == [named.owners(one) for one in KEYS]
    plain = RendezvousHash(["h:1@h:1", "h:2@h:2"])
    assert [plain.owners(one) for one in KEYS] == [RendezvousHash(["h:1", "h:2"]).owners(one) for one in KEYS]
