"""Frames are protobuf: what one side writes the library reads, and what the library writes is read here."""

from __future__ import annotations

import time

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvcache.handoff.messages import PushFrame, framing
from kvcache.transfer.framing import Frame, read_varint
from serving.proto import millrace_pb2 as pb

numbers = st.integers(0, 2**32 - 1)
payloads = st.binary(min_size=1, max_size=600) | st.integers(1, 70_000).map(lambda size: b"x" * size)
chunks = st.builds(
    pb.Chunk,
    lease=st.builds(pb.LeaseId, lease=st.text(max_size=20), epoch=numbers, instance=st.text(max_size=20)),
    layout=st.text(max_size=200),
    first_layer=numbers,
    last_layer=numbers,
    start=numbers,
    end=numbers,
    digest=st.binary(max_size=16),
    encoding=st.sampled_from(["", "int8"]),
    buffer=st.none() | numbers,
)
others = st.sampled_from(
    [
        pb.PushMessage(),
        pb.PushMessage(settled=True),
        pb.PushMessage(hello=pb.PushHello(transport="nixl")),
        pb.PushMessage(commit=pb.Commit(lease=pb.LeaseId(lease="a", epoch=3), first_token=7)),
        pb.PushMessage(chunk=pb.Chunk(buffer=0)),
    ]
)


def whole(frame: PushFrame) -> pb.PushMessage:
    """The message with its payload in it, as the library would have it."""
    message = pb.PushMessage()
    message.CopyFrom(frame.message)
    if frame.payload:
        message.chunk.payload = bytes(frame.payload)
    return message


@given(chunks, payloads)
def test_the_library_reads_what_is_written_here(chunk: pb.Chunk, payload: bytes) -> None:
    frame = Frame(pb.PushMessage(chunk=chunk), (memoryview(payload),))
    assert pb.PushMessage.FromString(framing.encode(frame)) == whole(frame)
    back = framing.decode(framing.encode(frame))
    assert (back.message, bytes(back.payload)) == (frame.message, payload)
    assert isinstance(back.payload, memoryview), "it was not copied"


@given(chunks, payloads)
def test_what_the_library_writes_is_read_here(chunk: pb.Chunk, payload: bytes) -> None:
    """There the payload lies between the other fields."""
    chunk.payload = payload
    message = pb.PushMessage(chunk=chunk)
    frame = framing.decode(message.SerializeToString())
    assert whole(frame) == message and bytes(frame.payload) == payload
    assert isinstance(frame.payload, memoryview)


@given(others)
def test_messages_without_a_payload_are_the_librarys(message: pb.PushMessage) -> None:
    assert (
        framing.decode(message.SerializeToString()) == Frame(message) == framing.decode(framing.encode(Frame(message)))
    )


@given(chunks, payloads, payloads)
def test_of_two_payloads_the_last_one_counts(chunk: pb.Chunk, first: bytes, second: bytes) -> None:
    """As everywhere in protobuf, within a message and when two of them are merged."""
    one, two = (pb.Chunk(payload=payload).SerializeToString() for payload in (first, second))
    twice = pb.PushMessage(chunk=pb.Chunk.FromString(one + two + chunk.SerializeToString()))
    merged = pb.PushMessage(chunk=pb.Chunk.FromString(one)).SerializeToString() + twice.SerializeToString()
    inner = one + two + chunk.SerializeToString()
    nested = b"\x0a" + varint(len(inner)) + inner
    for data in (merged, nested):
        assert whole(framing.decode(data)) == pb.PushMessage.FromString(data)


@given(st.binary(max_size=60) | st.builds(lambda data: b"\x0a" + varint(len(data)) + data, st.binary(max_size=60)))
def test_what_is_no_message_is_refused_as_the_library_refuses_it(data: bytes) -> None:
    try:
        expected = pb.PushMessage.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            framing.decode(data)
    else:
        assert whole(framing.decode(data)) == expected


def test_a_number_without_end_is_refused_at_once() -> None:
    def seconds() -> float:
        began = time.process_time()
        with pytest.raises(IndexError):
            read_varint(b"\xff" * (16 << 20), 0)
        return time.process_time() - began

    assert read_varint(varint(2**64 - 1), 0) == (2**64 - 1, 10)
    assert min(seconds() for _ in range(3)) < 0.5


def varint(value: int) -> bytes:
    return bytes([*(value >> shift & 0x7F | 0x80 for shift in range(0, 63, 7) if value >> shift > 0x7F)]) + bytes(
        [value >> 7 * max(0, (value.bit_length() - 1) // 7)]
    )
