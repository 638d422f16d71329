"""Reading streams: wherever the bytes are cut, the same events; tokens counted and timed as they came."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sse import CompletionReader, EventSplitter, Outcome

STREAM = (
    b': hello\ndata: {"a":1}\n\nevent: x\r\ndata:{"b":2}\r\n\r\n'
    b"data: first\ndata: second\n\nid: 7\n\n\ndata: caf\xc3\xa9\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":1}', b'{"b":2}', b"first\nsecond", b"caf\xc3\xa9", b"[DONE]"]


def feed_all(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events + splitter.close()


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_cut_at_any_byte_changes_nothing(cut: int) -> None:
    assert feed_all([STREAM[:cut], STREAM[cut:]]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_number_of_cuts_changes_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert feed_all([STREAM[a:b] for a, b in pairwise(edges)]) == EVENTS


@given(st.lists(st.binary(min_size=1).filter(lambda data: b"\n" not in data and b"\r" not in data)), st.data())
def test_events_survive_whatever_they_hold(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10))
    edges = [0, *sorted(cuts), len(stream)]
    assert feed_all([stream[a:b] for a, b in pairwise(edges)]) == payloads


def test_an_event_is_given_as_soon_as_its_blank_line_has_come() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\n") == []
    assert splitter.feed(b"\n") == [b"x"]


def test_a_last_event_without_its_blank_line_is_still_read() -> None:
    assert feed_all([b"data: one\n\ndata: [DONE]"]) == [b"one", b"[DONE]"]


def read(chunks: list[tuple[float, Any]], *, end: float = 99.0, max_tokens: int = 3) -> Outcome:
    """The outcome of chunks that came at given times; a dict is sent as JSON, bytes as they are."""
    outcome = Outcome(prompt_tokens=5, max_tokens=max_tokens, sent=1.0)
    reader = CompletionReader(outcome)
    for now, chunk in chunks:
        payload = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
        reader.feed(b"data: " + payload + b"\n\n", now)
    reader.close(end)
    return outcome


def text(words: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": finish, **more}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def test_times_and_counts_of_an_ordinary_stream() -> None:
    chunks = [(1.5, text("a")), (1.75, text("b")), (2.25, text("c", "length")), (2.5, usage(7, 3)), (2.5, b"[DONE]")]
    outcome = read(chunks, end=2.5)
    assert outcome.error is None
    assert (outcome.ttft, outcome.latency, outcome.gaps) == (0.5, 1.25, [0.25, 0.5])
    assert outcome.tpot == (1.25 - 0.5) / 2
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.chunks) == (7, 3, 3)
    assert outcome.finished == 2.5


def test_usage_counts_where_a_chunk_carries_several_tokens() -> None:
    outcome = read([(1.5, text("a b")), (2.0, text("c d", "length")), (2.0, usage(7, 4))], max_tokens=4)
    assert (outcome.chunks, outcome.output_tokens) == (2, 4)
    assert outcome.tpot == pytest.approx(0.5 / 3)


def test_token_ids_count_before_usage_and_chunks() -> None:
    chunks = [(1.5, text("ab", token_ids=[4, 5])), (2.0, text("c", "length", token_ids=[6])), (2.0, usage(7, 9))]
    outcome = read(chunks)
    assert (outcome.output_tokens, outcome.token_ids, outcome.reported) == (3, 3, 9)


def test_without_usage_or_ids_a_chunk_is_a_token() -> None:
    assert read([(1.5, text("a")), (2.0, text("b", "stop"))]).output_tokens == 2


def test_empty_text_is_a_token_but_an_empty_closing_chunk_is_not() -> None:
    outcome = read([(1.5, text("")), (2.0, text("b")), (2.25, text("", "length")), (2.25, b"[DONE]")])
    assert (outcome.chunks, outcome.ttft, outcome.gaps) == (2, 0.5, [0.5])
    assert outcome.last == 2.25


def test_a_single_token_without_text_is_a_token() -> None:
    outcome = read([(1.5, text("", "length")), (1.5, usage(5, 1))], max_tokens=1)
    assert (outcome.error, outcome.ttft, outcome.chunks, outcome.tpot) == (None, 0.5, 1, None)


def test_chat_says_who_speaks_before_its_first_token() -> None:
    def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}

    chunks = [
        (1.1, delta(role="assistant", content="")),
        (2.0, delta(reasoning_content="hm")),
        (2.5, delta(content="hi")),
        (3.0, delta(tool_calls=[{"function": {"arguments": "{}"}}])),
        (3.0, delta("stop")),
    ]
    outcome = read(chunks)
    assert (outcome.ttft, outcome.chunks, "".join(outcome.text)) == (1.0, 3, "hmhi{}")
    spoken = read([(1.1, delta(role="assistant", content="hi")), (1.2, b"[DONE]")])
    assert spoken.chunks == 1
    assert spoken.ttft == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([], "no tokens"),
        ([(1.5, b"[DONE]")], "no tokens"),
        ([(1.5, text("a"))], "cut short"),
        ([(1.5, text("a")), (1.6, {"error": {"message": "fell over"}}), (1.6, b"[DONE]")], "error event"),
        ([(1.5, text("a")), (1.6, b"{not json"), (1.6, b"[DONE]")], "bad chunk"),
        ([(1.5, b"[1]"), (1.6, b"[DONE]")], "bad chunk"),
    ],
)
def test_every_way_of_not_answering_has_its_name(chunks: list[tuple[float, Any]], kind: str) -> None:
    assert read(chunks).error == kind


def test_the_first_failure_is_the_one_that_counts() -> None:
    outcome = read([(1.5, {"error": {"message": "fell over"}})])
    assert (outcome.error, outcome.detail) == ("error event", "fell over")
