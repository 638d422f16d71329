"""Each sequence of a step goes to one rank, and no rank has much more to do than another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.rank_group.division import divided

SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1, max_size=30)


@given(SEQUENCES, st.integers(1, 5))
def test_every_sequence_has_one_rank(sequences: list[tuple[int, int]], ranks: int) -> None:
    lens = [queries for queries, _ in sequences]
    found = divided(lens, [queries + before for queries, before in sequences], ranks)
    assert len(found) == ranks
    assert sorted(one for part in found for one in part) == list(range(len(sequences)))
    assert all(part == sorted(part) for part in found)
    assert found[0], "the leader waits at no barrier of its own: it has a part in every step"
    rows = [sum(lens[one] for one in part) for part in found]
    assert max(rows) - min(rows) <= max(lens)


@given(st.integers(1, 40), st.integers(1, 5))
def test_decodes_are_shared_evenly(sequences: int, ranks: int) -> None:
    parts = divided([1] * sequences, list(range(sequences)), ranks)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_among_equals_contexts_are_balanced() -> None:
    assert divided([1, 1, 1, 1], [100, 1, 90, 2], 2) == [[0, 1], [2, 3]]
