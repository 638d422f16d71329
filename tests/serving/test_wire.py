"""The wire form: every message comes back as it left, whatever it holds, and a newer peer's words do no harm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import wire
from serving.errors import InternalError, MillraceError, leaves
from serving.links import LeaseEvent
from serving.messages import (
    Audit,
    Delta,
    FinishReason,
    LeaseGrant,
    LeaseId,
    LeaseOrder,
    Prefilled,
    PrefillOrder,
    Request,
    Role,
    SamplingParams,
    Slo,
    TokenLogprob,
    WorkerStatus,
)
from serving.proto import millrace_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NUMBER = st.floats(allow_nan=False)  # infinities and negative zero included
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # all that UTF-8 can carry
TOKENS = st.lists(U32, max_size=5).map(tuple)
PAIRS = st.lists(st.tuples(U32, NUMBER), max_size=4).map(tuple)

LOGPROB = st.builds(TokenLogprob, NUMBER, PAIRS)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=U32,
    seed=U64,
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=U32,
    min_p=NUMBER,
    repetition_penalty=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    logit_bias=PAIRS,
    min_tokens=U32,
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | U32,
)
REQUEST = st.builds(
    Request,
    request_id=TEXT,
    prompt=TOKENS,
    sampling=SAMPLING,
    slo=st.builds(Slo, ttft_ms=st.none() | NUMBER, tpot_ms=st.none() | NUMBER),
    tenant=TEXT,
    prompt_logprobs=st.none() | U32,
)
DELTA = st.builds(
    Delta,
    index=U32,
    tokens=TOKENS,
    logprobs=st.lists(LOGPROB, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    cached_tokens=U32,
    prompt_logprobs=st.lists(st.none() | LOGPROB, max_size=3).map(tuple),
)
LEASE = st.builds(LeaseId, lease=TEXT, epoch=U32, instance=TEXT)
ORDER = st.builds(LeaseOrder, lease=LEASE, request=REQUEST, generated=TOKENS)
GRANT = st.builds(LeaseGrant, lease=LEASE, cached_tokens=U32, address=TEXT)
PREFILLED = st.builds(Prefilled, delta=DELTA, cached_tokens=U32, queue_seconds=NUMBER, compute_seconds=NUMBER)
OWN = sorted(
    (kind for kind in leaves().values() if kind.__module__ == "serving.errors"), key=lambda kind: kind.__name__
)
ERROR = st.builds(
    lambda kind, text, param, code, after: kind(text, param=param, code=code, retry_after=after),
    st.sampled_from(OWN),
    TEXT,
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | NUMBER,
)
STATUS = st.builds(
    WorkerStatus,
    instance=TEXT,
    name=TEXT,
    role=st.sampled_from(Role),
    address=TEXT,
    fingerprint=TEXT,
    model=TEXT,
    max_model_len=U32,
    block_size=U32,
    total_blocks=U32,
    free_blocks=U32,
    max_seqs=U32,
    running=U32,
    waiting=U32,
    waiting_tokens=U32,
    draining=st.booleans(),
    stalled_seconds=NUMBER,
    counters=st.dictionaries(TEXT, NUMBER, max_size=3),
)
COUNTS = st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=3)

MESSAGES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sampling": (SAMPLING, wire.sampling_to_pb, wire.sampling_from_pb),
    "request": (REQUEST, wire.request_to_pb, wire.request_from_pb),
    "logprob": (st.none() | LOGPROB, wire.logprob_to_pb, wire.logprob_from_pb),
    "delta": (DELTA, wire.delta_to_pb, wire.delta_from_pb),
    "lease": (LEASE, wire.lease_to_pb, wire.lease_from_pb),
    "order": (ORDER, wire.order_to_pb, wire.order_from_pb),
    "grant": (GRANT, wire.grant_to_pb, wire.grant_from_pb),
    "prefill order": (
        st.builds(PrefillOrder, order=ORDER, grant=st.none() | GRANT),
        wire.prefill_order_to_pb,
        wire.prefill_order_from_pb,
    ),
    "prefilled": (PREFILLED, wire.prefilled_to_pb, wire.prefilled_from_pb),
    "status": (STATUS, wire.status_to_pb, wire.status_from_pb),
    "audit": (
        st.builds(Audit, service=TEXT, counts=COUNTS, leaked=COUNTS),
        wire.audit_to_pb,
        wire.audit_from_pb,
    ),
}


def over_the_wire(message: Any) -> Any:
    """The same message, from its bytes."""
    arrived = type(message)()
    arrived.ParseFromString(message.SerializeToString())
    return arrived


@pytest.mark.parametrize("name", MESSAGES)
@settings(max_examples=40)
@given(data=st.data())
def test_every_message_comes_back_as_it_left(name: str, data: st.DataObject) -> None:
    strategy, to_pb, from_pb = MESSAGES[name]
    message = data.draw(strategy)
    assert from_pb(over_the_wire(to_pb(message))) == message


def test_the_strategies_above_know_every_field() -> None:
    """A field nobody draws is a field nobody would miss on the wire."""
    left_out = {"Request": {"deadline"}}  # on the router's clock, which no one else can read
    for kind, message in ((SamplingParams, pb.SamplingParams), (Request, pb.Request), (Delta, pb.Delta)):
        fields = {field.name for field in dataclasses.fields(kind)} - left_out.get(kind.__name__, set())
        split = {"logit_bias": "bias_tokens", "slo": "ttft_slo_ms"}
        assert {split.get(name, name) for name in fields} <= set(message.DESCRIPTOR.fields_by_name)


@given(ERROR)
def test_an_error_keeps_its_class_and_all_it_says(error: MillraceError) -> None:
    arrived = wire.error_from_pb(over_the_wire(wire.error_to_pb(error)))
    assert type(arrived) is type(error) and vars(arrived) == vars(error) and str(arrived) == str(error)


@given(TEXT, st.none() | DELTA, st.none() | ERROR)
def test_a_lease_event_keeps_its_delta_or_its_error(
    lease: str, delta: Delta | None, error: MillraceError | None
) -> None:
    arrived = wire.event_from_pb(over_the_wire(wire.event_to_pb(LeaseEvent(lease, 3, delta, error))))
    assert (arrived.lease, arrived.epoch, arrived.delta) == (lease, 3, delta)
    assert type(arrived.error) is type(error)


@given(TEXT)
def test_an_error_nobody_knows_is_an_internal_one(kind: str) -> None:
    arrived = wire.error_from_pb(pb.Error(kind=f"{kind}!", message="what", code="why"))
    assert type(arrived) is InternalError and (arrived.message, arrived.code) == ("what", "why")


def test_only_what_was_set_is_set() -> None:
    """Zero is a value: none of these may come back as None, nor None as zero."""
    zero = SamplingParams(max_tokens=0, logprobs=0)
    assert wire.sampling_from_pb(over_the_wire(wire.sampling_to_pb(zero))).logprobs == 0
    request = Request(request_id="", prompt=(), sampling=zero, slo=Slo(ttft_ms=0.0), prompt_logprobs=0)
    arrived = wire.request_from_pb(over_the_wire(wire.request_to_pb(request)))
    assert (arrived.slo, arrived.prompt_logprobs) == (Slo(ttft_ms=0.0), 0)
