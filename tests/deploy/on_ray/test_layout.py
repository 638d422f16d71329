"""Whatever is scaled and whoever leaves in whatever order: numbers come true, and nobody has two places."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.on_ray.layout import RayGroup, RayLayout


def group(name: str, count: int, disk: str | None = None) -> RayGroup:
    bundle = {"CPU": 1.0}
    return RayGroup(name=name, kind=name, count=count, command=(name,), bundle=bundle, threads=1, disk=disk)


def names(layout: RayLayout) -> list[list[str | None]]:
    """Who sits in every bundle, set by set."""
    return [[bundle.service.name if bundle.service else None for bundle in one.bundles] for one in layout.sets]


def test_every_set_has_some_of_each_group() -> None:
    layout = RayLayout.of([group("prefill", 2), group("decode", 3)], sets=2)
    assert names(layout) == [["prefill-0", "decode-0", "decode-2"], ["prefill-1", "decode-1"]]


def test_sets_without_services_are_refused() -> None:
    with pytest.raises(ValueError, match="sets = 3: the largest group has 2"):
        RayLayout.of([group("prefill", 2), group("decode", 1)], sets=3)


def test_added_services_take_free_bundles_before_a_set_of_their_own() -> None:
    layout = RayLayout.of([group("prefill", 1), group("decode", 2)], sets=1)
    layout.scale({"decode": 1})
    assert layout.leaving == {"decode-1"}
    assert layout.left("decode-1") is None
    layout.scale({"decode": 3, "prefill": 2})
    assert names(layout) == [["prefill-0", "decode-0", "decode-1"], ["decode-2", "prefill-1"]]


def test_a_set_that_all_have_left_is_given_up() -> None:
    layout = RayLayout.of([group("decode", 2)], sets=2)
    second = layout.sets[1]
    layout.scale({"decode": 1})
    assert layout.left("decode-1") is second
    assert names(layout) == [["decode-0"]]


def test_one_that_leaves_keeps_its_name_until_it_has_left() -> None:
    layout = RayLayout.of([group("decode", 2)], sets=1)
    layout.scale({"decode": 1})
    layout.scale({"decode": 2})
    assert names(layout) == [["decode-0", "decode-1"], ["decode-2"]]
    assert layout.counts() == {"decode": 2}


@pytest.mark.parametrize("wanted", [{"prefill": 0}, {"prefill": 1001}, {"draft": 1}])
def test_numbers_that_cannot_be_change_nothing(wanted: dict[str, int]) -> None:
    layout = RayLayout.of([group("prefill", 1), group("decode", 1)], sets=1)
    with pytest.raises(ValueError, match=r"group"):
        layout.scale({"decode": 3} | wanted)
    assert names(layout) == [["prefill-0", "decode-0"]]
    assert layout.leaving == set()


def test_a_node_of_the_pool_has_a_folder_of_its_own() -> None:
    layout = RayLayout.of([group("kvcache", 2, disk="/disk")], sets=1)
    commands = [service.command for _, _, service in layout.services()]
    assert [command[1:] for command in commands] == [
        ("--worker-name", "kvcache-0", "--disk=/disk/kvcache-0"),
        ("--worker-name", "kvcache-1", "--disk=/disk/kvcache-1"),
    ]


COUNTS = st.integers(1, 6)


@given(
    first=st.tuples(COUNTS, COUNTS),
    moves=st.lists(st.one_of(st.tuples(st.sampled_from(["prefill", "decode"]), COUNTS), st.integers(0, 20))),
)
def test_numbers_come_true_whatever_the_order(first: tuple[int, int], moves: list[tuple[str, int] | int]) -> None:
    """A move is a wish, or the number of one that leaves and now has left."""
    layout = RayLayout.of([group("prefill", first[0]), group("decode", first[1])], sets=max(first))
    wanted = {"prefill": first[0], "decode": first[1]}
    for move in moves:
        if isinstance(move, tuple):
            wanted[move[0]] = move[1]
            layout.scale(dict([move]))
        elif layout.leaving:
            layout.left(sorted(layout.leaving)[move % len(layout.leaving)])
        seated = Counter(service.name for _, _, service in layout.services())
        assert layout.counts() == wanted
        assert all(count == 1 for count in seated.values())
        assert layout.leaving <= set(seated)
        assert all(any(bundle.service for bundle in one.bundles) for one in layout.sets)
        assert all(
            bundle.service is None or bundle.service.group is bundle.group for s in layout.sets for bundle in s.bundles
        )
        assert len({one.number for one in layout.sets}) == len(layout.sets)
