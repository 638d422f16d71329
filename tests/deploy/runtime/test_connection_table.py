"""Bounds on connections: they always hold, whoever comes in whatever order, and nobody is evicted for a stranger."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deploy.runtime.connection_table import Admission, ConnectionEnd, ConnectionTable

Event = tuple[str, int, int]  # what happens, to which connection, of which network
EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "idle", "busy", "leave"]), st.integers(0, 15), st.integers(0, 2)), max_size=60
)


@given(events=EVENTS, most=st.integers(1, 8), most_of_address=st.integers(0, 4))
def test_bounds_hold_and_only_idle_ones_make_room(events: list[Event], most: int, most_of_address: int) -> None:
    table: ConnectionTable[int] = ConnectionTable(most, most_of_address)
    network: dict[int, str] = {}
    waiting: list[int] = []  # the idle ones, the one that has waited for longest first
    for what, who, number in events:
        if what == "come" and who not in network:
            came = str(number)
            mine = [one for one in waiting if network[one] == came]
            crowded = most_of_address > 0 and list(network.values()).count(came) >= most_of_address
            full = len(network) >= most
            able = mine[:1] if crowded else longest_of_the_largest(waiting, network)
            admission = table.admit(who, came)
            if not crowded and not full:
                assert admission == Admission()
            elif able:
                assert admission.refused is None and admission.evicted in able
                del network[admission.evicted]
                waiting.remove(admission.evicted)
            else:
                assert admission.refused is (ConnectionEnd.ADDRESS if crowded else ConnectionEnd.CONNECTIONS)
            if admission.refused is None:
                network[who] = came
                waiting.append(who)
        elif what == "idle":
            table.idle(who)
            if who in network and who not in waiting:
                waiting.append(who)
        elif what == "busy":
            table.busy(who)
            if who in waiting:
                waiting.remove(who)
        elif what == "leave":
            table.leave(who)
            network.pop(who, None)
            if who in waiting:
                waiting.remove(who)
        assert len(table) == len(network) <= most
        assert table.idle_count == len(waiting)
        for name in ("0", "1", "2"):
            assert table.of(name) == list(network.values()).count(name)
            assert not most_of_address or table.of(name) <= most_of_address
    for who in list(network):
        table.leave(who)
    assert not any((table._network, table._count, table._idle_count, table._idle_of, table._crowds))


def longest_of_the_largest(waiting: list[int], network: dict[int, str]) -> list[int]:
    """Of each network that has most of those that wait, the one that has waited for longest."""
    sizes = Counter(network[one] for one in waiting)
    largest = [name for name, size in sizes.items() if size == max(sizes.values())]
    return [next(one for one in waiting if network[one] == name) for name in largest]


def test_a_crowd_makes_room_for_itself() -> None:
    """Before: whoever had sent nothing yet when as many others had come was closed, whosever they were."""
    table: ConnectionTable[int] = ConnectionTable(10, 0)
    table.admit(-1, "a client")
    for number in range(1000):
        assert table.admit(number, f"source {number % 3}").evicted != -1
    table.busy(-1)
    assert table.of("a client") == 1 and len(table) == 10
