"""The wire form: every message comes back as it left, whatever it holds, and words of a newer peer do no harm."""

from __future__ import annotations

import dataclasses
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import wire
from serving.errors import InternalError, MillraceError, NoRoom
from serving.links import LeaseEvent
from serving.messages import (
    Audit,
    Delta,
    LeaseGrant,
    LeaseId,
    LeaseOrder,
    PoolReport,
    Prefilled,
    PrefillOrder,
    Request,
    SamplingParams,
    Slo,
    TokenLogprob,
    WorkerStatus,
)
from serving.proto import millrace_pb2 as pb
from serving.proto import pool_pb2 as pool
from serving.wire import error_from_pb, error_to_pb, event_from_pb, event_to_pb, from_pb, to_pb

MESSAGES: dict[type, type[Message]] = {
    SamplingParams: pb.SamplingParams,
    Request: pb.Request,
    LeaseId: pb.LeaseId,
    LeaseOrder: pb.LeaseOrder,
    LeaseGrant: pb.LeaseGrant,
    PrefillOrder: pb.PrefillOrder,
    Prefilled: pb.Prefilled,
    WorkerStatus: pb.WorkerStatus,
    Audit: pb.Audit,
    PoolReport: pool.PoolStat,
}

NUMBER = st.floats(allow_nan=False)  # infinities and negative zero included
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # all that UTF-8 can carry
COUNTS = st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=3)
SCALARS = {
    bool: st.booleans(),
    int: st.integers(0, 2**32 - 1),
    float: NUMBER,
    str: TEXT,
    bytes: st.binary(max_size=12),
}
WIDER = {
    "SamplingParams.seed": st.integers(0, 2**64 - 1),
    "Request.deadline": st.none(),  # on the router's clock, which no other process can read
    "Request.priority": st.integers(-(2**31), 2**31 - 1),
    "Request.session": st.just(""),  # the router alone places by it
    "Request.alone": st.just(True),  # likewise
    "Request.client": st.just(""),  # and queues by this
    "Audit.counts": COUNTS,
    "Audit.leaked": COUNTS,
}


def any_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of this type, with every field of a dataclass drawn, those with a default too."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return st.one_of(st.none() if part is NoneType else any_of(part) for part in arguments)
    if origin is tuple:
        if arguments[1:] == (...,):
            return st.lists(any_of(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*map(any_of, arguments))
    if origin is dict:
        return st.dictionaries(any_of(arguments[0]), any_of(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(annotation):
        hints = get_type_hints(annotation)
        drawn = {name: f"{annotation.__name__}.{name}" for name in hints}
        return st.builds(
            annotation, **{name: WIDER[key] if key in WIDER else any_of(hints[name]) for name, key in drawn.items()}
        )
    if issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    return ERROR if annotation is MillraceError else SCALARS[annotation]


OWN = sorted(
    (kind for kind in MillraceError.by_name.values() if kind.__module__ == "serving.errors"),
    key=lambda kind: kind.__name__,
)
ERROR = st.builds(
    lambda kind, text, param, code, after: kind(text, param=param, code=code, retry_after=after),
    st.sampled_from(OWN),
    TEXT,
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | NUMBER,
)


def over_the_wire(message: Any) -> Any:
    """The same message, from its bytes."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(("kind", "target"), MESSAGES.items(), ids=[kind.__name__ for kind in MESSAGES])
@settings(max_examples=40)
@given(data=st.data())
def test_every_message_comes_back_as_it_left(kind: type, target: type[Message], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    assert from_pb(over_the_wire(to_pb(message, target)), kind) == message


@given(st.none() | any_of(TokenLogprob))
def test_a_logprob_comes_back_as_it_left(logprob: TokenLogprob | None) -> None:
    assert wire.logprob_from_pb(over_the_wire(wire.logprob_to_pb(logprob))) == logprob


@given(any_of(Delta))
def test_a_delta_comes_back_as_it_left(delta: Delta) -> None:
    assert wire.delta_from_pb(over_the_wire(wire.delta_to_pb(delta))) == delta


@given(ERROR)
def test_an_error_keeps_its_class_and_all_it_says(error: MillraceError) -> None:
    arrived = error_from_pb(over_the_wire(error_to_pb(error)))
    assert type(arrived) is type(error) and vars(arrived) == vars(error) and str(arrived) == str(error)


@given(any_of(LeaseEvent))
def test_a_lease_event_keeps_its_delta_or_its_error(event: LeaseEvent) -> None:
    arrived = event_from_pb(over_the_wire(event_to_pb(event)))
    assert (arrived.lease, arrived.epoch, arrived.delta) == (event.lease, event.epoch, event.delta)
    assert type(arrived.error) is type(event.error)


# ---- a field that one side lacks -----------------------------------------------------------------------------------


def filled(annotation: Any) -> Any:
    """A value of this type in which no field is left at zero, empty or None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return filled(next(part for part in arguments if part is not NoneType))
    if origin is tuple:
        values = tuple(filled(part) for part in arguments if part is not ...)
        return (*values, None) if get_origin(arguments[0]) is UnionType else values  # an absent logprob too
    if origin is dict:
        return {filled(arguments[0]): filled(arguments[1])}
    if dataclasses.is_dataclass(annotation):
        return annotation(**{name: filled(part) for name, part in get_type_hints(annotation).items()})
    if issubclass(annotation, Enum):
        return next(iter(annotation))
    if annotation is MillraceError:
        return NoRoom("full", param="p", code="c", retry_after=1.0)
    return {bool: True, int: 1, float: 0.5, str: "x", bytes: b"x"}[annotation]


def fields_set(message: Message, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The fields that are set in `message` and in what it holds, by the name of the message."""
    seen = found.setdefault(message.DESCRIPTOR.name, set())
    for field, value in message.ListFields():
        seen.add(field.name)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                fields_set(part, found)
    return found


def test_every_field_of_the_protocol_is_written() -> None:
    messages = [to_pb(filled(kind), target) for kind, target in MESSAGES.items()]
    found: dict[str, set[str]] = {}
    for message in [*messages, event_to_pb(filled(LeaseEvent))]:
        fields_set(message, found)
    described = {**pb.DESCRIPTOR.message_types_by_name, **pool.DESCRIPTOR.message_types_by_name}
    assert found == {name: set(described[name].fields_by_name) for name in found}
    assert {"Delta", "TokenLogprob", "Error", "TransportOffer", "TierStat", "NamespaceStat"} <= set(found)


def test_a_dataclass_field_that_the_protocol_lacks_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Newer(LeaseId):
        colour: str = "red"

    newer = Newer(lease="l", epoch=1, instance="i")
    with pytest.raises(TypeError, match=r"Newer\.colour is no field of millrace\.v1\.LeaseId"):
        to_pb(newer, pb.LeaseId)


def test_a_field_of_a_type_without_a_wire_form_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd:
        lease: complex

    with pytest.raises(TypeError, match="complex"):
        from_pb(pb.LeaseId(lease="l"), Odd)


@given(TEXT)
def test_an_error_of_an_unknown_class_is_an_internal_one(kind: str) -> None:
    arrived = error_from_pb(pb.Error(kind=f"{kind}!", message="what", code="why"))
    assert type(arrived) is InternalError and (arrived.message, arrived.code) == ("what", "why")


def test_only_what_was_set_is_set() -> None:
    """Zero is a value: none of these may come back as None, nor None as zero."""
    zero = SamplingParams(max_tokens=0, logprobs=0)
    assert from_pb(over_the_wire(to_pb(zero, pb.SamplingParams)), SamplingParams).logprobs == 0
    request = Request(request_id="", prompt=(), sampling=zero, slo=Slo(ttft_ms=0.0), prompt_logprobs=0)
    arrived = from_pb(over_the_wire(to_pb(request, pb.Request)), Request)
    assert (arrived.slo, arrived.prompt_logprobs) == (Slo(ttft_ms=0.0), 0)
