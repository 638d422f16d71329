"""No call waits longer than it may, whatever has stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from serving.expert_parallel.bounded import BoundedStore, Overdue, StoreUnavailable, within
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.meeting import exchanged
from tests.fakes.stopping import stop
from tests.serving.expert_parallel.ranks import Ranks, keep_store

PATIENCE = 0.3


@pytest.fixture
def stopped() -> Iterator[TCPStore]:
    """A store whose process has stopped."""
    with Ranks() as group:
        keeper = group.start(0, keep_store)
        store = TCPStore("127.0.0.1", keeper.answer(), is_master=False, timeout=timedelta(seconds=PATIENCE))
        store.set("known", "word")
        stop(keeper.pid)
        yield store


def test_a_store_that_has_stopped_is_given_up_for_good(stopped: TCPStore) -> None:
    bounded = BoundedStore(stopped, PATIENCE)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        bounded.ask(lambda store: store.get("known"))
    asked = list[Store]()
    with pytest.raises(StoreUnavailable):
        bounded.under("prefix").ask(asked.append)
    assert asked == []


def test_a_meeting_in_a_store_that_has_stopped_ends(stopped: TCPStore) -> None:
    with pytest.raises(StoreUnavailable):
        exchanged(BoundedStore(stopped, PATIENCE), "topic", 0, 2, b"", PATIENCE)


def test_a_store_that_is_gone_is_said_to_be() -> None:
    with Ranks() as group:
        keeper = group.start(0, keep_store)
        store = TCPStore("127.0.0.1", keeper.answer(), is_master=False, timeout=timedelta(seconds=PATIENCE))
        keeper.close()
        with pytest.raises(StoreUnavailable):
            BoundedStore(store).ask(lambda asked: asked.get("known"))


def test_what_a_call_gives_and_raises_is_passed_on() -> None:
    bounded = BoundedStore(HashStore())
    bounded.under("a").ask(lambda store: store.set("key", "word"))
    assert bounded.ask(lambda store: store.get("a/key")) == b"word"

    def raising() -> None:
        raise RankLost(3, "it is gone")

    with pytest.raises(RankLost, match="rank 3"):
        within(10.0, raising)
    never = threading.Event()
    with pytest.raises(Overdue, match="no answer"):
        within(0.01, never.wait)
    never.set()
