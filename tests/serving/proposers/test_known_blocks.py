"""Which blocks hold a proposer's KV: by what they were filled for, as long as nothing else is written there."""

from __future__ import annotations

from serving.engine.proposed import ProposerState
from serving.engine.sequence import SequenceState
from serving.proposers.known_blocks import KnownBlocks
from tests.fakes.sequences import make_sequence

SIZE = 4


def in_blocks(blocks: list[int], keys: list[bytes], tokens: int = 16) -> SequenceState:
    seq = make_sequence(None, [1] * tokens)
    seq.blocks, seq.prefix.keys = blocks, keys
    return seq


def filled(known: KnownBlocks, seq: SequenceState, upto: int) -> ProposerState:
    state = ProposerState()
    known.begin(seq, state, upto)
    known.written(seq, state, upto)
    return state


def test_full_blocks_are_known_by_their_content_wherever_they_are_shared() -> None:
    known = KnownBlocks(SIZE)
    filled(known, in_blocks([7, 3, 5], [b"a", b"b", b"c"]), 11)
    assert known.leading(in_blocks([7, 3, 5, 9], [b"a", b"b", b"c", b"d"])) == 8, "block 5 lacks a token"
    assert known.leading(in_blocks([7, 3], [b"a", b"x"])) == 4
    assert known.leading(in_blocks([3, 7], [b"a", b"b"])) == 0, "the right content elsewhere"


def test_what_others_write_over_is_known_no_more() -> None:
    known = KnownBlocks(SIZE)
    filled(known, in_blocks([7, 3], [b"a", b"b"]), 8)
    known.begin(in_blocks([3, 7], [b"x", b"y"]), ProposerState(), 5)  # and then it ends, with a token in block 7
    assert known.leading(in_blocks([7, 3], [b"a", b"b"])) == 0


def test_blocks_that_are_named_later_are_known_later() -> None:
    known = KnownBlocks(SIZE)
    seq = in_blocks([7, 3], [b"a"])
    state = filled(known, seq, 8)
    assert (known.leading(seq), state.named) == (4, 1)
    seq.prefix.keys.append(b"b")
    known.written(seq, state, 8)
    assert known.leading(seq) == 8


def test_a_block_in_place_of_another_ends_what_is_sure() -> None:
    known = KnownBlocks(SIZE)
    seq = in_blocks([7, 3, 5], [])
    state = filled(known, seq, 12)
    state.guessed = [1]
    known.settle(seq, state)
    assert (state.sure, state.guessed) == (12, [1])
    seq.blocks = [7, 8, 5]
    known.settle(seq, state)
    assert (state.sure, state.blocks, state.guessed) == (4, [7], [])


def test_blocks_that_have_gone_take_their_tokens_along() -> None:
    known = KnownBlocks(SIZE)
    seq = in_blocks([7, 3, 5], [])
    state = filled(known, seq, 12)
    seq.blocks = []
    known.settle(seq, state)
    assert (state.sure, state.blocks) == (0, [])


def test_kv_that_does_not_begin_with_the_text_is_shared_with_nobody() -> None:
    known = KnownBlocks(SIZE)
    seq = in_blocks([7, 3, 5], [b"a", b"b", b"c"])
    state = ProposerState(first=4, sure=4, blocks=[7])
    known.written(seq, state, 12)
    assert state.sure == 12 and known.leading(seq) == 0
