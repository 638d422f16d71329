"""What tenants were served is known of all that wait, however many others there have been."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serving import fair_shares
from serving.fair_shares import MOST_TENANTS, FairShares


def test_who_waits_is_not_forgotten_for_those_that_come_and_go() -> None:
    """Before: it counted as never served, and went before all others for a long time."""
    shares = FairShares()
    for tenant in ("busy", "other"):
        shares.arrived(tenant, {"busy"} - {tenant})
        shares.charge(tenant, 100_000)
    before = shares.served("busy"), shares.served("other")
    for number in range(MOST_TENANTS + 100):
        shares.arrived(f"passing {number}", {"busy", "other"})
        shares.charge(f"passing {number}", 1)
    assert (shares.served("busy"), shares.served("other")) == before and min(before) >= 100_000
    assert len(shares._served) <= MOST_TENANTS + 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=60), st.sets(st.integers(0, 9), max_size=4))
def test_with_room_for_few_those_that_wait_keep_their_count(served: list[tuple[int, int]], waits: set[int]) -> None:
    most, fair_shares.MOST_TENANTS = fair_shares.MOST_TENANTS, 3
    try:
        shares, waiting, sums = FairShares(), {str(tenant) for tenant in waits}, dict[str, float]()
        for tenant in sorted(waiting):
            shares.arrived(tenant, {other for other in waiting if other < tenant})
            sums[tenant] = shares.served(tenant)
        for number, tokens in served:
            tenant = str(number)
            if tenant not in waiting:
                shares.arrived(tenant, waiting)
            shares.charge(tenant, tokens)
            if tenant in sums:
                sums[tenant] += tokens
        assert {tenant: shares.served(tenant) for tenant in waiting} == sums
        assert len(shares._served) <= max(3, len(waiting) + 1)
    finally:
        fair_shares.MOST_TENANTS = most
