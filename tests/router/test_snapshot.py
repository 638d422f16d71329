"""What a router has learned is there after a restart, for the workers that are still the same ones."""

from __future__ import annotations

import zlib
from base64 import b64decode
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Fleet, RouterConfig
from router.goodput import Goodput
from router.placer import Placer
from router.policies import make_policy
from router.prefix_index import MOST_BITS, PrefixIndex
from router.snapshot import CALIBRATED, DIGEST, LENGTH, MAGIC, Restored, packed, parts, restore
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
    assert restore(after.placer, before.snapshot()) == Restored(2, ())
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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        header(b"[]"),
        header(b"{"),
        header(b'{"mask_bytes":1}'),
        header(b'{"mask_bytes":1.0,"shards":1}') + b"\0\0\0\0",
        header(b'{"mask_bytes":[],"shards":0}'),
        header(b'{"mask_bytes":1,"shards":1,"names":{},"numbers":{},"learned":{}}'),
        header(b'{"mask_bytes":-9,"shards":1}') + b"\x04\0\0\0",  # its shards would have no end,
        header(b'{"mask_bytes":-8,"shards":1}') + b"\x04\0\0\0",  # or no width
    ],
)
def test_what_no_router_keeps_is_refused(body: bytes) -> None:
    after = Life()
    with pytest.raises(ValueError):
        restore(after.placer, sealed(body))
    assert after.known() == {} and not after.fleet.returning.names and not after.placer.outputs.kept()


WORKERS, OUTPUTS, LINKS = "workers and their blocks", "lengths of outputs", "costs of handoffs"
CALIBRATION = {"calibration", *CALIBRATED.values()}


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ({}, {WORKERS, OUTPUTS, LINKS, "calibration"}),
        ({"names": {}, "numbers": {}, "learned": {}}, {OUTPUTS, LINKS, "calibration"}),
        ({"numbers": {"a-1": [0, 1], "b-1": [0, 1]}}, {WORKERS}),
        ({"numbers": {"a-1": [0, -5]}}, {WORKERS}),
        ({"numbers": {"a-1": [0, 1e300]}}, {WORKERS}),
        ({"learned": {"outputs": {"a": [-1, 1]}, "links": {}, "calibration": None}}, {OUTPUTS, LINKS}),
        ({"learned": {"outputs": {}, "links": {"all": [0, 1, 1, 1, 1], "pairs": []}, "calibration": None}}, {LINKS}),
        ({"learned": {"outputs": {"a": [1, 1e308]}, "links": 1, "calibration": 1}}, {LINKS, *CALIBRATED.values()}),
    ],
)  # fmt: skip
def test_a_part_of_another_shape_is_left_out(told: dict[str, Any], lost: set[str]) -> None:
    whole, after = header_of(lived().snapshot()), Life()
    body = told and {"names": whole["names"], "numbers": whole["numbers"], "learned": whole["learned"], **told}
    assert set(restore(after.placer, sealed(header(orjson.dumps({"mask_bytes": 1, "shards": 0, **body})))).lost) == lost


def header_of(snapshot: bytes) -> dict[str, Any]:
    body = zlib.decompress(snapshot[len(MAGIC) + DIGEST :])
    found = orjson.loads(body[LENGTH : LENGTH + int.from_bytes(body[:LENGTH], "little")])
    assert isinstance(found, dict)
    return found


def with_header(snapshot: bytes, told: dict[str, Any]) -> bytes:
    body = zlib.decompress(snapshot[len(MAGIC) + DIGEST :])
    return sealed(header(orjson.dumps(told)) + body[LENGTH + int.from_bytes(body[:LENGTH], "little") :])


LEAVES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
ODD = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)
LIVED = lived().snapshot()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whatever_one_part_is_the_others_are_there_again(data: st.DataObject) -> None:
    """A later or an earlier version may keep it in any other shape."""
    told, after = header_of(LIVED), Life()
    path = data.draw(st.sampled_from(["names", "numbers", "outputs", "links", "calibration"]))
    inside: Any = told if path in told else told["learned"]
    at: Any = path
    while inside[at] and isinstance(inside[at], (dict, list)) and data.draw(st.booleans()):
        inside = inside[at]
        at = data.draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
    inside[at] = data.draw(ODD)
    restored = restore(after.placer, with_header(LIVED, told))
    parts_of = {"outputs": {OUTPUTS}, "links": {LINKS}, "calibration": CALIBRATION}
    assert set(restored.lost) <= parts_of.get(path, {WORKERS})
    was, now = lived(), header_of(after.snapshot())
    if path in parts_of:
        assert after.known() == was.known() and restored.workers == 2
    for name, kept in header_of(LIVED)["learned"].items():
        assert name == path or now["learned"][name] == kept


# What the version before corrections were kept apart for workers that do both wrote, with what `lived` has learned.
OF_AN_EARLIER_VERSION = (
    "bWlsbHJhY2Ugcm91dGVyIDEK3H/a+GqNeQy6sNugsKkBNQE/2g/F5q1EeYwUEoJz7UN4Ae1UMWsUQRTeM/oHBFGs4qSTuWVmdmZ2"
    "9xSMkMLOzhTrIbOXDXfc3d6xN0eicSGVdvbBUkRMYZFGLAIWahFSxYA/wE4rCy2sfG8ukg254kDLPJZl3rz3fW/f7Dfv8gXP2yC5"
    "6Wcj0tggps5JgxhCSepWKSkpycf9NCuO4wmjnDWPUhJOZROS+mbUfZA+tMjDKRm1TbECSy0p6WWmyLMV5B+M7XBsHVVqbKtNGknM"
    "mA+EyNHr5N1JmV4PItKPWBBrxjXVknOfayEDHjujwlehDlkE70BQ2A0Zj5QvIy5D9KgUSvsh01JGOkCMgk8emg42kiSu00kL9L/X"
    "wV5aptdJC2M7gxwbX4W6FgrDEbvemC+YCAOhlGTwREJQ5nMRCsbiUMdSqwgcOBZKBmuOwf2aZGZcWdLjWgzIWUzxp03YzqJnp3Gk"
    "wynaAJmsjgvbzgo3E1xinfkBqDIMVAzChQsm4GqDGiMlhFZMxyrmjIVVxboRkswOBFGSkc2GlRGAo+G0dInN1nGIVG7TtLR/0H+z"
    "LMua53mXtuz7n7d+fMD1TIaJj71rh3f3nj6poXNvbenN/YNfj+YQjhvPuh+3l17c3j9Bic5CazB/5fP5VycCf1F7u7u/z326+NrR"
    "4GbVELG4XF9YPjBvT6ExETdvzte297/t1ObQ2dk8vPp9K/k6lQ4RVUPAy/z6nXdfnt+YSl9NnmX9B18Og+I="
)


def test_of_an_earlier_version_only_what_has_another_shape_is_lost() -> None:
    before, after = lived(), Life()
    restored = restore(after.placer, b64decode(OF_AN_EARLIER_VERSION))
    assert restored.workers == 2 and restored.lost == ("calibration of TTFT", "calibration of TPOT", "usual TPOTs")
    assert after.known() == before.known() == {"a-1": 10, "b-1": 4}
    then, now = (header_of(life.snapshot()) for life in (before, after))
    for told in (then, now):
        del told["learned"]["calibration"]["first"], told["learned"]["calibration"]["further"]
    assert now == then


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
