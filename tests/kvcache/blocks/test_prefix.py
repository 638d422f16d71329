"""Block keys: equal exactly where the KV would be, whatever way the chain was built."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.prefix import extend_keys, root_key

TOKENS = st.lists(st.integers(0, 3), max_size=24)  # few symbols, so that prefixes do meet
BLOCK = st.integers(1, 5)
QUICK = settings(max_examples=200, deadline=None)


def chain(tokens: list[int], block_size: int, root: bytes = b"root") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, block_size)
    return keys


@QUICK
@given(TOKENS, TOKENS, BLOCK)
def test_keys_are_equal_exactly_where_prefixes_are(one: list[int], other: list[int], block_size: int) -> None:
    first, second = chain(one, block_size), chain(other, block_size)
    assert len(first) == len(one) // block_size
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        upto = (i + 1) * block_size
        assert (a == b) == (one[:upto] == other[:upto])


@QUICK
@given(TOKENS, BLOCK, st.lists(st.integers(0, 24), max_size=6))
def test_a_chain_built_step_by_step_is_the_chain_built_at_once(
    tokens: list[int], block_size: int, stops: list[int]
) -> None:
    keys: list[bytes] = []
    for stop in sorted(min(stop, len(tokens)) for stop in stops):
        before = list(keys)
        extend_keys(keys, b"root", tokens, block_size, upto=stop)
        assert keys[: len(before)] == before and len(keys) == stop // block_size
    extend_keys(keys, b"root", tokens, block_size)
    assert keys == chain(tokens, block_size)


def test_no_two_places_in_a_repeating_text_share_a_key() -> None:
    keys = chain([7] * 64, 4)
    assert len(set(keys)) == len(keys) == 16


def test_every_part_of_the_root_separates() -> None:
    variants = [("f", "", False), ("f", "", True), ("f", "t", False), ("g", "", False), ("", "f", False)]
    roots = [root_key(*variant) for variant in variants]
    assert len(set(roots)) == len(roots)
    tokens = list(range(8))
    chains = [chain(tokens, 4, root) for root in roots]
    for one, other in combinations(chains, 2):
        assert not set(one) & set(other)


@QUICK
@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_fingerprint_and_tenant_do_not_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    assert (root_key(a, b) == root_key(c, d)) == ((a, b) == (c, d))


def test_the_largest_token_id_has_a_key_of_its_own() -> None:
    assert chain([2**32 - 1], 1) != chain([0], 1)
