"""What a router has learned is there after a restart, for the workers that are still the same ones."""

from __future__ import annotations

import zlib
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Fleet, RouterConfig
from router.goodput import Goodput
from router.placer import Placer
from router.policies import make_policy
from router.prefix_index import MOST_BITS, PrefixIndex
from router.snapshot import MAGIC, packed, parts, restore
from serving.messages import KVEvents
from tests.router.scripted import make_status
from tests.router.test_prefix_index import ROOMY, key

KEYS = [key(number)[:8] for number in range(40)]


class Life:
    """A router between two restarts. Time stands at 100 s unless moved."""

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        config = {"policy": "goodput", **config}
        self.fleet = Fleet(RouterConfig(**config), lambda status: NotImplemented, clock=lambda: self.now)
        self.placer = Placer(self.fleet, make_policy(self.fleet.config.policy))

    @property
    def index(self) -> PrefixIndex:
        assert self.fleet.prefixes is not None
        return self.fleet.prefixes

    def beat(self, name: str, life: str = "1", stored: int | None = None) -> None:
        """A heartbeat; `stored` first blocks are all that the worker holds."""
        instance = f"{name}-{life}"
        events = None
        if stored is not None:
            events = KVEvents(first=-1, next=stored, reset=True, stored=tuple(KEYS[:stored]))
        self.fleet.heartbeat(make_status(name, instance=instance), events)

    def snapshot(self) -> bytes:
        return packed(parts(self.placer))

    def known(self) -> dict[str, int]:
        return self.index.match(KEYS)


def lived(**config: Any) -> Life:
    life = Life(**config)
    if life.fleet.prefixes is not None:
        life.beat("a", stored=10)
        life.beat("b", stored=4)
    life.placer.outputs.ended("batch", 900)
    for tokens in (100, 2000, 500):
        life.fleet.link_costs.observed("a-1", "b-1", tokens, tokens * 1e-3)
    if isinstance(life.placer.policy, Goodput):
        life.placer.policy.calibration.first_token("a-1", 1.0, 1.5)
        life.placer.policy.calibration.further_tokens("b-1", 0.1, 0.05)
    return life


def test_all_that_was_learned_is_there_again() -> None:
    before, after = lived(), Life()
    assert restore(after.placer, before.snapshot()) == 2
    assert after.known() == before.known() == {"a-1": 10, "b-1": 4}
    assert after.index.since("a-1") == 10, "the worker is asked for what came since"
    assert after.placer.outputs.expected("batch", 0, 10_000) == before.placer.outputs.expected("batch", 0, 10_000)
    for pair in (("a-1", "b-1"), ("b-1", "a-1")):
        assert after.fleet.ways.seconds(*pair, 700) == before.fleet.ways.seconds(*pair, 700) > 0.1
    was, now = before.placer.policy, after.placer.policy
    assert isinstance(was, Goodput) and isinstance(now, Goodput)
    for worker in ("a-1", "b-1", "other"):
        assert now.calibration.first(worker) == was.calibration.first(worker)
        assert now.calibration.further(worker) == was.calibration.further(worker)
    assert after.snapshot() == before.snapshot(), "nothing is lost by a second restart right after the first"


def test_what_is_of_a_worker_that_has_restarted_is_dropped_at_its_first_heartbeat() -> None:
    after = Life()
    restore(after.placer, lived().snapshot())
    after.beat("a", life="2")
    assert after.known() == {"b-1": 4} and after.index.since("a-1") == 0
    after.beat("b", stored=None)
    assert after.known() == {"b-1": 4} and after.index.since("b-1") == 4
    after.now += 60.0
    after.beat("b", stored=None)
    after.fleet.expire()
    assert after.known() == {"b-1": 4}, "one that has come back is a worker like all others"


def test_workers_that_do_not_come_back_are_forgotten_after_a_while() -> None:
    after = Life(silence=5.0)
    restore(after.placer, lived().snapshot())
    for _ in range(3):
        after.now += 4.0
        after.fleet.expire()
    assert after.known() == {"a-1": 10, "b-1": 4}, "they have as long as one that falls silent"
    after.now += 4.0
    after.fleet.expire()
    assert after.known() == {} and len(after.fleet.returning.names) == 0


def test_a_router_that_stops_while_it_waits_keeps_what_it_waits_for() -> None:
    first, second = Life(), Life()
    restore(first.placer, lived().snapshot())
    restore(second.placer, first.snapshot())
    assert second.known() == {"a-1": 10, "b-1": 4}
    second.beat("a", life="2")
    assert second.known() == {"b-1": 4}


@pytest.mark.parametrize("policies", [("least_loaded", "goodput"), ("goodput", "least_loaded"), ("prefix_aware",) * 2])
def test_another_policy_takes_what_it_can_use(policies: tuple[str, str]) -> None:
    before, after = lived(policy=policies[0]), Life(policy=policies[1])
    restore(after.placer, before.snapshot())
    assert after.placer.outputs.expected("batch", 0, 10_000) == 900
    if after.fleet.prefixes is not None and before.fleet.prefixes is not None:
        assert after.known() == before.known()


def test_an_index_with_less_room_takes_what_fits() -> None:
    before, after = Life(), Life(prefix_index_bytes=20 * (176 + MOST_BITS // 8))
    before.beat("a", stored=40)
    restore(after.placer, before.snapshot())
    assert len(after.index) == after.index.most_keys == 20


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_anywhere_is_noticed_and_changes_nothing(data: st.DataObject) -> None:
    whole, after = lived().snapshot(), Life()
    kind = data.draw(st.sampled_from(("cut", "flipped", "longer")))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = {
        "cut": whole[:at],
        "flipped": whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :],
        "longer": whole + b"\0" * (1 + at % 3),
    }[kind]
    with pytest.raises(ValueError):
        restore(after.placer, damaged)
    assert after.known() == {} and not after.fleet.returning.names and not after.placer.outputs.kept()


def sealed(body: bytes) -> bytes:
    """A digest over it, as a snapshot of some other version may have one."""
    return MAGIC + sha256(zlib.compress(body)).digest() + zlib.compress(body)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


NOTHING_LEARNED = (
    b'{"mask_bytes":0,"shards":0,"names":{},"numbers":{%s},"learned":{"outputs":{},'
    b'"links":{"all":[1,1,1,1,1],"pairs":[]},"calibration":null}}'
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        header(b"[]"),
        header(b"{"),
        header(b'{"mask_bytes":1}'),
        header(b'{"mask_bytes":1,"shards":0}'),
        header(b'{"mask_bytes":1,"shards":1,"names":{},"numbers":{},"learned":{}}'),
        header(b'{"mask_bytes":0,"shards":0,"names":{},"numbers":{},"learned":{"outputs":{"a":[-1,1]}}}'),
        header(
            b'{"mask_bytes":0,"shards":0,"names":{},"numbers":{"a":[0,1],"b":[0,1]},"learned":{"outputs":{},'
            b'"links":{"all":[1,1,1,1,1],"pairs":[]},"calibration":null}}'
        ),
        header(
            b'{"mask_bytes":0,"shards":0,"names":{},"numbers":{},"learned":{"outputs":{},'
            b'"links":{"all":[0,1,1,1,1],"pairs":[]},"calibration":null}}'
        ),
        header(
            b'{"mask_bytes":0,"shards":0,"names":{},"numbers":{},"learned":{"outputs":{},'
            b'"links":{"all":[1,1,1,1,1],"pairs":[]},"calibration":{"first":{"all":[9,1,1],"own":{}}}}}'
        ),
        header(b'{"mask_bytes":-9,"shards":1}') + b"\x04\0\0\0",  # its shards would have no end,
        header(b'{"mask_bytes":-8,"shards":1}') + b"\x04\0\0\0",  # or no width
        header(NOTHING_LEARNED % b'"a":[0,-5]'),
        header(NOTHING_LEARNED % b'"a":[0,1e300]'),
    ],
)
def test_what_no_router_keeps_is_refused(body: bytes) -> None:
    after = Life()
    with pytest.raises(ValueError):
        restore(after.placer, sealed(body))
    assert after.known() == {} and not after.fleet.returning.names and not after.placer.outputs.kept()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 39), st.integers(0, 12)), max_size=30),
    st.sets(st.sampled_from("abcdef")),
)
def test_an_index_is_what_it_was(placed: list[tuple[str, int, int]], gone: set[str]) -> None:
    before, after = PrefixIndex(ROOMY), PrefixIndex(ROOMY)
    for name, first, count in placed:
        before.stored(name, KEYS[first : first + count])
    before.retain(set("abcdef") - gone)
    entries = ((each, mask) for shard in range(before.shards) for each, mask in before.entries(shard).items())
    after.restore(before.numbers(), list(entries))
    for first in range(40):
        assert after.match(KEYS[first:]) == before.match(KEYS[first:])
    after.stored("new", KEYS[:3])
    assert after.match(KEYS)["new"] == 3 and "new" not in after.match(KEYS[3:])


def test_what_is_no_whole_key_is_left_out() -> None:
    """A worker may send anything as a block's key."""
    before, after = Life(), Life()
    before.beat("a", stored=10)
    for odd in (b"", b"short"):
        before.index.stored("a-1", [odd])
    restore(after.placer, before.snapshot())
    assert after.known() == {"a-1": 10} and len(after.index) == 10
