"""Between any two layouts every rank gets its layers and heads, each once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcache.memory.kv_pieces import kv_pieces
from serving.parallel.layout import ParallelLayout
from tests.serving.parallel.test_layout import SPEC

layouts = st.builds(ParallelLayout, tensor=st.integers(1, 4), pipeline=st.integers(1, 3), sequence=st.integers(1, 3))


@settings(max_examples=200)
@given(source=layouts, target=layouts, kv_heads=st.sampled_from([1, 2, 3, 4, 6]))
def test_every_rank_gets_what_it_keeps(source: ParallelLayout, target: ParallelLayout, kv_heads: int) -> None:
    spec = replace(SPEC, heads=24, kv_heads=kv_heads, layers=5)
    try:
        source.check(spec)
        target.check(spec)
    except ValueError:
        assume(False)
    got: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(target.ranks)}
    for piece in kv_pieces(spec, source, target):
        heads, layers = source.kv_heads(spec, piece.sender), source.layers(spec, piece.sender)
        place = target.kv_heads(spec, piece.receiver)
        for number, layer in enumerate(piece.layers):
            assert layers[layer] == target.layers(spec, piece.receiver)[piece.first_layer + number]
            for theirs, ours in zip(piece.heads.heads, piece.heads.place, strict=True):
                assert heads[theirs] == place[ours]
                got[piece.receiver].append((layers[layer], heads[theirs]))
    for rank, found in got.items():
        kept = [(layer, head) for layer in target.layers(spec, rank) for head in target.kv_heads(spec, rank)]
        assert sorted(found) == kept
