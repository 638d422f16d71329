"""Leases that give way: late ones that nothing has been computed of, and no more of them than it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.giving_way import LONGEST, giving_way
from decode.leases import Lease
from kvcache.handoff.chunk import encode
from serving.errors import DeadlineExceeded, NoRoom, Preempted
from serving.messages import LeaseId, LeaseOrder, Role
from tests.decode.workers import FINGERPRINT, SPECS, Worker
from tests.fakes.kv_layouts import random_pool
from tests.fakes.sequences import lease_id, make_order, make_sequence

PROMPT = list(range(10))
LATE = {"first_token_in": -1.0}


def lease(name: str, reserved: int, first_token_in: float | None, priority: int = 0, **fields: object) -> Lease:
    seq = make_sequence(None, PROMPT, stays=True, first_token_in=first_token_in, priority=priority, **fields)
    seq.reserved = reserved
    return Lease(lease_id(name), "session", seq, [0])


def newcomer(first_token_in: float | None = 1.0, **fields: object) -> LeaseOrder:
    return make_order(PROMPT, lease=lease_id("new"), first_token_in=first_token_in, **fields)


LEASES = st.lists(
    st.builds(
        lease,
        st.text("abc", min_size=1),
        st.integers(0, 9),
        st.one_of(st.none(), st.sampled_from([-2 * LONGEST, -LONGEST, -1.0, 0.0, 1.0])),
        st.integers(-1, 1),
        generated=st.sampled_from([(), (1,)]),
    ),
    max_size=8,
)


@given(leases=LEASES, blocks=st.integers(0, 30), priority=st.integers(-1, 1))
def test_only_what_may_and_only_if_it_is_enough(leases: list[Lease], blocks: int, priority: int) -> None:
    found = giving_way(newcomer(priority=priority), leases, blocks, 0.0)
    may = [
        each
        for each in leases
        if each.seq.reserved
        and -LONGEST < each.seq.objectives.due < 0.0
        and each.seq.objectives.priority >= priority
        and not each.seq.order.generated
    ]
    assert all(any(each is one for one in may) for each in found)
    freed = [each.seq.reserved for each in found]
    assert bool(found) is (bool(may) and sum(each.seq.reserved for each in may) >= blocks)
    assert not found or sum(freed) >= blocks, "it is enough"
    assert len(found) < 2 or all(sum(freed) - each < blocks for each in freed), "and nobody of them is not needed"


def test_the_least_important_go_first_then_those_that_free_most() -> None:
    leases = [lease("a", 5, -1.0), lease("b", 1, -1.0, priority=1), lease("c", 2, -1.0, priority=1)]
    names = [[each.fence.lease for each in giving_way(newcomer(), leases, blocks, 0.0)] for blocks in (1, 2, 3, 4, 7)]
    assert names == [["c"], ["c"], ["c", "b"], ["a"], ["c", "a"]], "none that is not needed"


def test_of_those_that_are_not_needed_the_less_important_go() -> None:
    leases = [lease("least", 4, -1.0, priority=2), lease("middle", 4, -1.0, priority=1), lease("most", 8, -1.0)]
    assert [each.fence.lease for each in giving_way(newcomer(), leases, 12, 0.0)] == ["least", "most"]


@pytest.mark.parametrize("left", [None, 0.0, -1.0])
def test_nobody_gives_way_to_what_is_late_itself_or_due_at_no_time(left: float | None) -> None:
    leases = [lease("a", 5, -1.0)]
    assert not giving_way(newcomer(left), leases, 1, 0.0)
    assert giving_way(newcomer(left, generated=[1]), leases, 1, 0.0) == leases, "but to a text that goes on"


# ---- a worker ------------------------------------------------------------------------------------------------------


async def test_a_late_lease_gives_way_and_its_router_is_told_once() -> None:
    worker = Worker(Role.DECODE, blocks=8)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.lease(session, PROMPT, "r/2", first_token_in=1.0)
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/3")
    await worker.lease(session, PROMPT, "r/4", first_token_in=1.0)
    (event,) = worker.events
    assert event.lease == "r/1" and isinstance(event.error, Preempted)
    assert sorted(worker.decode.table.leases) == ["r/2", "r/4"]
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/5", first_token_in=1.0)
    assert worker.decode.counters()["leases_gave_way"] == 1.0
    session.cancel("r/1")  # as the router does when it has been told
    await session.close()
    assert worker.idle() and worker.kv.unaccounted([]) == 0


async def test_a_place_among_the_sequences_is_given_up_too() -> None:
    worker = Worker(Role.DECODE, seqs=2)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.lease(session, PROMPT, "r/2", **LATE)
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/3", **LATE)
    await worker.lease(session, PROMPT, "r/4", first_token_in=1.0)
    assert len(worker.decode.table.leases) == 2 and len(worker.events) == 1
    await session.close()
    assert worker.idle()


@pytest.mark.parametrize("left", [1.0, None, -1.0])
async def test_a_router_that_holds_nothing_has_its_turn_where_all_requests_are_alike(left: float | None) -> None:
    """Its requests find a full worker, and each place that comes free is asked for by the other router first."""
    worker = Worker(Role.DECODE, seqs=4)
    a, b = [await worker.worker.decode.connect(name, lambda *_: None, lambda _: None) for name in "ab"]
    for number in range(4):
        await worker.lease(a, PROMPT, f"a/{number}", first_token_in=left)
    with pytest.raises(NoRoom):
        await worker.lease(b, PROMPT, "b/0", first_token_in=left)
    a.cancel("a/0")
    with pytest.raises(NoRoom, match="keeps its room for another router"):
        await worker.lease(a, PROMPT, "a/4", first_token_in=left)
    await a.close()
    await b.close()


async def test_nobody_gives_way_for_nothing() -> None:
    """Not to what finds no blocks either way, and not twice where one end makes both a place and room."""
    worker = Worker(Role.DECODE, blocks=8, seqs=2)
    session = await worker.session()
    await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.lease(session, PROMPT, "r/2", **LATE)
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT * 3, "r/3", first_token_in=1.0)
    with pytest.raises(DeadlineExceeded):
        await worker.lease(session, PROMPT, "r/4", first_token_in=1.0, ends_in=0.0)
    assert not worker.events
    await worker.lease(session, PROMPT, "r/5", first_token_in=1.0)
    assert len(worker.decode.table.leases) == 2 and len(worker.events) == 1
    await session.close()
    assert worker.idle()


async def test_a_lease_whose_kv_arrives_gives_way_to_nobody() -> None:
    worker = Worker(Role.DECODE, blocks=5)
    session = await worker.session()
    grant = await worker.lease(session, PROMPT, "r/1", **LATE)
    await worker.decode.receive(first_chunk(grant.lease))
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/2", first_token_in=1.0)
    assert not worker.events
    await session.close()
    assert worker.idle()


async def test_blocks_are_there_when_kv_arrives() -> None:
    """They were reserved: others may have used what was free since, but not so much that they are wanting."""
    worker = Worker(Role.DECODE, blocks=8)
    session = await worker.session()
    grant = await worker.lease(session, PROMPT, "r/1")
    seq = worker.decode.table.check(grant.lease).seq
    await worker.lease(session, PROMPT, "r/2")
    with pytest.raises(NoRoom):
        await worker.lease(session, PROMPT, "r/3")
    assert not seq.blocks and seq.reserved == 3 and worker.worker.status().free_blocks == 2
    await worker.decode.receive(first_chunk(grant.lease))
    assert len(seq.blocks) == 3 and not seq.reserved and worker.worker.status().free_blocks == 2
    await session.close()
    assert worker.idle()


def first_chunk(fence: LeaseId) -> object:
    return encode(random_pool(SPECS, 8, 4, 7), fence, FINGERPRINT, range(2), list(range(8)), 0, len(PROMPT))
