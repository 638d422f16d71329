"""Words between a leader and a rank: whole, and with a deadline whatever the other does."""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Iterator

import pytest

from serving.channel import Channel, ChannelClosed, ChannelLate

SHORT = 0.05  # seconds
LONG = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_words_arrive_in_order_however_long(ends: tuple[Channel, Channel]) -> None:
    ours, other = ends
    words = [b"", {"a": 1}, b"x" * (4 << 20), None]
    sending = threading.Thread(target=lambda: [ours.send(word, LONG) for word in words])
    sending.start()
    assert [other.receive(LONG) for _ in words] == words
    sending.join()


def test_who_says_nothing_is_late(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelLate):
        ends[0].receive(SHORT)


def test_who_does_not_listen_is_late(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelLate):
        ends[0].send(b"x" * (16 << 20), SHORT)


def test_a_word_that_does_not_end_is_late(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ChannelLate):
        ends[0].send(b"x" * (16 << 20), SHORT)
    with pytest.raises(ChannelLate):
        ends[1].receive(SHORT)


@pytest.mark.parametrize("first", [1, 8, 9, 40])
def test_a_word_that_comes_in_time_the_next_time_is_whole(first: int) -> None:
    """Wherever the deadline has cut it: who was late is heard when it has spoken."""
    ours, theirs = Channel.pair()
    with theirs:
        word = pickle.dumps("late, not lost" * 3)
        sent = struct.pack("<Q", len(word)) + word
        theirs.sendall(sent[:first])
        with pytest.raises(ChannelLate):
            ours.receive(SHORT)
        theirs.sendall(sent[first:] + sent)
        assert [ours.receive(LONG) for _ in range(2)] == ["late, not lost" * 3] * 2
        ours.close()


def test_who_leaves_is_noticed_at_once(ends: tuple[Channel, Channel]) -> None:
    ours, other = ends
    other.close()
    with pytest.raises(ChannelClosed):
        ours.receive(None)
    with pytest.raises(ChannelClosed):
        ours.send("anything", LONG)
