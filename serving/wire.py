"""Frozen dataclasses to protobuf messages and back. A field crosses under its own name, by its type annotation.

Explicit code stands only for fields whose wire form differs, and for what crosses in every step. It decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from serving.errors import InternalError, MillraceError
from serving.links import LeaseEvent
from serving.messages import (
    Delta,
    FinishReason,
    KVEvents,
    NamespaceStat,
    PoolReport,
    PoolStat,
    Request,
    SamplingParams,
    Slo,
    Tier,
    TierStat,
    TokenLogprob,
)
from serving.proto import millrace_pb2 as pb
from serving.proto import pool_pb2 as pool

KEY_BYTES = 8  # of a block key in KV events

D = TypeVar("D")
P = TypeVar("P", bound=Message)
Conversion = Callable[[Any], Any]


def to_pb(message: Any, target: type[P]) -> P:
    """The dataclass `message` as a `target`. Raises TypeError when a field of it has no wire form."""
    return target(**_fields_to_pb(message, target))


def from_pb(message: Message, kind: type[D]) -> D:
    """The protobuf `message` as the dataclass `kind`; fields that it does not know are left out.

    Raises ValueError for a word that one of its enums does not have, TypeError as `to_pb`.
    """
    return kind(**_fields_from_pb(message, kind))


# ---- any dataclass ---------------------------------------------------------------------------------------------


class _FieldCodec(NamedTuple):
    name: str
    optional: bool  # None is a field that is not present
    write: Conversion
    read: Conversion


def _fields_to_pb(message: Any, target: Any) -> dict[str, Any]:
    kind: type = type(message)
    fields = _DIFFERENT[kind].write(message) if kind in _DIFFERENT else {}
    for name, _, write, _ in _codecs(kind, target.DESCRIPTOR):
        value = getattr(message, name)
        if value is not None:
            fields[name] = write(value)
    return fields


def _fields_from_pb(message: Message, kind: type) -> dict[str, Any]:
    fields = _DIFFERENT[kind].read(message) if kind in _DIFFERENT else {}
    for name, optional, _, read in _codecs(kind, message.DESCRIPTOR):
        fields[name] = None if optional and not message.HasField(name) else read(getattr(message, name))
    return fields


@cache
def _codecs(kind: type, target: Descriptor) -> tuple[_FieldCodec, ...]:
    """How the fields of a dataclass cross that have one form on both sides."""
    hints = get_type_hints(kind, localns={})  # not the class's own names: a field may be called `bytes`
    different = _DIFFERENT[kind].names if kind in _DIFFERENT else ()
    found = []
    for name in (field.name for field in dataclasses.fields(kind) if field.name not in different):
        described = target.fields_by_name.get(name)
        if described is None:
            raise TypeError(f"{kind.__name__}.{name} is no field of {target.full_name}")
        annotation, optional = hints[name], False
        if get_origin(annotation) in (Union, UnionType):
            (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
            optional = True
        inner = GetMessageClass(described.message_type) if described.message_type else None
        found.append(_FieldCodec(name, optional, *_codec(annotation, inner)))
    return tuple(found)


def _codec(annotation: Any, target: type[Message] | None) -> tuple[Conversion, Conversion]:
    """How a value of this type is written and read. Raises TypeError for a type that has no general wire form."""
    if annotation in _EXPLICIT:
        return _EXPLICIT[annotation]
    if annotation in (bool, int, float, str, bytes):
        return _same, _same
    if target is not None and isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return partial(to_pb, target=target), partial(from_pb, kind=annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return str, annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and arguments[1:] == (...,):
        write, read = _codec(arguments[0], target)
        if read is _same:
            return _same, tuple
        return (lambda values: [write(value) for value in values]), (lambda values: tuple(map(read, values)))
    if origin is dict and all(part in (int, float, str) for part in arguments):
        return _same, dict
    raise TypeError(f"{annotation} has no wire form")


def _same(value: Any) -> Any:
    return value


# ---- fields whose wire form differs ----------------------------------------------------------------------------


class _Different(NamedTuple):
    """Fields of a dataclass that have another name or form in protobuf, as keyword arguments of either side."""

    names: tuple[str, ...]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[Any], dict[str, Any]]


def _request_slo(message: pb.Request) -> dict[str, Any]:
    return {
        "slo": Slo(
            ttft_ms=message.ttft_slo_ms if message.HasField("ttft_slo_ms") else None,
            tpot_ms=message.tpot_slo_ms if message.HasField("tpot_slo_ms") else None,
        )
    }


def _holdings_to_pb(stat: PoolStat) -> dict[str, Any]:
    tiers = (pool.TierStat(tier=tier, **_fields_to_pb(held, pool.TierStat)) for tier, held in stat.tiers.items())
    namespaces = (
        pool.NamespaceStat(namespace=name, **_fields_to_pb(held, pool.NamespaceStat))
        for name, held in stat.namespaces.items()
    )
    return {"tiers": tiers, "namespaces": namespaces}


def _holdings_from_pb(message: pool.PoolStat) -> dict[str, Any]:
    """Tiers that this version does not know are left out."""
    known = {tier.value for tier in Tier}
    return {
        "tiers": {Tier(held.tier): from_pb(held, TierStat) for held in message.tiers if held.tier in known},
        "namespaces": {held.namespace: from_pb(held, NamespaceStat) for held in message.namespaces},
    }


def _keys(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))


_DIFFERENT: dict[type, _Different] = {
    KVEvents: _Different(
        ("stored", "removed"),
        lambda events: {"stored": b"".join(events.stored), "removed": b"".join(events.removed)},
        lambda message: {"stored": _keys(message.stored), "removed": _keys(message.removed)},
    ),
    SamplingParams: _Different(
        ("logit_bias",),
        lambda params: dict(zip(("bias_tokens", "bias_values"), _columns(params.logit_bias), strict=True)),
        lambda message: {"logit_bias": tuple(zip(message.bias_tokens, message.bias_values, strict=True))},
    ),
    Request: _Different(
        ("slo", "deadline", "session", "alone"),  # the router's: its clock is its own, and it places
        lambda request: {"ttft_slo_ms": request.slo.ttft_ms, "tpot_slo_ms": request.slo.tpot_ms},
        _request_slo,
    ),
    PoolStat: _Different(("tiers", "namespaces"), _holdings_to_pb, _holdings_from_pb),
    PoolReport: _Different(
        ("stat",),
        lambda report: _fields_to_pb(report.stat, pool.PoolStat),
        lambda message: {"stat": from_pb(message, PoolStat)},
    ),
}


def _columns(pairs: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [token for token, _ in pairs], [value for _, value in pairs]


# ---- what crosses in every step: the mapping above takes up to half as long again ------------------------------


def logprob_to_pb(logprob: TokenLogprob | None) -> pb.TokenLogprob:
    if logprob is None:
        return pb.TokenLogprob(absent=True)
    tokens, values = _columns(logprob.top)
    return pb.TokenLogprob(logprob=logprob.logprob, top_tokens=tokens, top_logprobs=values)


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob | None:
    if message.absent:
        return None
    return TokenLogprob(message.logprob, tuple(zip(message.top_tokens, message.top_logprobs, strict=True)))


def delta_to_pb(delta: Delta) -> pb.Delta:
    made = pb.Delta(
        index=delta.index,
        tokens=delta.tokens,
        logprobs=[logprob_to_pb(item) for item in delta.logprobs],
        finish=delta.finish or "",
        cached_tokens=delta.cached_tokens,
        prompt_logprobs=[logprob_to_pb(item) for item in delta.prompt_logprobs],
    )
    if delta.embedding:
        made.embedding = delta.embedding
    return made


def delta_from_pb(message: pb.Delta) -> Delta:
    return Delta(
        index=message.index,
        tokens=tuple(message.tokens),
        logprobs=tuple(item for item in map(logprob_from_pb, message.logprobs) if item is not None),
        finish=FinishReason(message.finish) if message.finish else None,
        cached_tokens=message.cached_tokens,
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
        embedding=message.embedding,
    )


def error_to_pb(error: MillraceError) -> pb.Error:
    told = {name: getattr(error, name) for name in ("message", "param", "code", "retry_after")}
    return pb.Error(kind=type(error).__name__, **told)


def error_from_pb(message: pb.Error) -> MillraceError:
    """An error of the same class as was sent; an unknown class (a newer peer) becomes InternalError."""
    told = {name: getattr(message, name) for name in ("param", "code", "retry_after") if message.HasField(name)}
    return MillraceError.by_name.get(message.kind, InternalError)(message.message, **told)


def event_to_pb(event: LeaseEvent) -> pb.LeaseEvent:
    return pb.LeaseEvent(
        lease=event.lease,
        epoch=event.epoch,
        delta=None if event.delta is None else delta_to_pb(event.delta),
        error=None if event.error is None else error_to_pb(event.error),
    )


def event_from_pb(message: pb.LeaseEvent) -> LeaseEvent:
    return LeaseEvent(
        message.lease,
        message.epoch,
        delta_from_pb(message.delta) if message.HasField("delta") else None,
        error_from_pb(message.error) if message.HasField("error") else None,
    )


_EXPLICIT: dict[Any, tuple[Conversion, Conversion]] = {Delta: (delta_to_pb, delta_from_pb)}
