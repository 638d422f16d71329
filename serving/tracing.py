"""Spans of requests, and how their context travels: from the client's headers through messages and calls to others.

What this process records is told by one tracer, which is none until `use` is called; no library is imported here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from serving.errors import MillraceError

HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context
LONGEST = 512  # characters of either, which W3C wants passed on; calls of gRPC have room for 8 KB of headers in all
Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C Trace Context: whose child a span is. Without a `traceparent` there is no trace."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (name, word) for name, word in zip(HEADERS, (self.traceparent, self.tracestate), strict=True) if word
        )


NONE = TraceContext()


class Span(Protocol):
    """One span that has begun. Its attributes are known by its end at the latest; `context` is that of its children."""

    context: TraceContext

    def event(self, name: str, attributes: Attributes) -> None: ...
    def end(self, attributes: Attributes, error: str = "") -> None: ...


class Tracer(Protocol):
    """Begins spans. `now` is in nanoseconds since 1970, as are beginnings."""

    def now(self) -> int: ...
    def begin(self, name: str, parent: TraceContext, began: int, *, serves: bool = False) -> Span | None:
        """None where the trace is not sampled. `serves`: it answers somebody outside, and may begin a trace."""


class NoTracer:
    """Records nothing."""

    def now(self) -> int:
        return 0

    def begin(self, name: str, parent: TraceContext, began: int, *, serves: bool = False) -> Span | None:
        return None


_tracer: list[Tracer] = [NoTracer()]


def tracer() -> Tracer:
    """This process's."""
    return _tracer[0]


def use(tracer: Tracer) -> None:
    """Have this process record with it from now on."""
    _tracer[0] = tracer


def recording() -> bool:
    return not isinstance(_tracer[0], NoTracer)


class PhaseSpan:
    """A span of something that is done for others. A context manager, also around awaits; where an error leaves it, the
    span says which. With no trace to be part of it does nothing.
    """

    __slots__ = ("_span", "attributes")

    def __init__(self, name: str, parent: TraceContext | None, attributes: Attributes | None = None):
        self.attributes: dict[str, Value] = dict(attributes or {})
        self._span: Span | None = None
        if parent is not None and parent.traceparent:
            now = tracer()
            self._span = now.begin(name, parent, now.now())

    @property
    def context(self) -> TraceContext:
        return self._span.context if self._span is not None else NONE

    def end(self, error: str = "") -> None:
        """Safe to repeat."""
        span, self._span = self._span, None
        if span is not None:
            span.end(self.attributes, error)

    def __enter__(self) -> PhaseSpan:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end("" if error is None or isinstance(error, GeneratorExit) else error_name(error))


def error_name(error: BaseException) -> str:
    """The word for `error.type`: never a message, which may quote the request."""
    if isinstance(error, MillraceError):
        return error.code or type(error).__name__
    return "cancelled" if isinstance(error, asyncio.CancelledError | GeneratorExit) else type(error).__name__


# ---- calls to other services ------------------------------------------------------------------------------------

_calling: ContextVar[TraceContext] = ContextVar("calling", default=NONE)


@contextmanager
def carried(context: TraceContext) -> Iterator[None]:
    """Calls made inside, in this task and those it starts, carry this context."""
    token = _calling.set(context)
    try:
        yield
    finally:
        _calling.reset(token)


def call_headers() -> tuple[tuple[str, str], ...]:
    """What a call made here has to carry."""
    return _calling.get().headers


def context_of(headers: Iterable[tuple[str, str | bytes]] | None) -> TraceContext:
    """The context that a call or an HTTP request came with, without what is too long to be passed on.

    As W3C Trace Context has it: of two `traceparent` neither counts, and several `tracestate` are one list.
    """
    told: dict[str, list[str]] = {name: [] for name in HEADERS}
    for name, word in headers or ():
        if name in told and isinstance(word, str):
            told[name].append(word)
    parents, states = told.values()
    parent = parents[0] if len(parents) == 1 and len(parents[0]) <= LONGEST else ""
    return TraceContext(parent, _joined(states) if parent else "")


def _joined(states: Sequence[str]) -> str:
    """One list, with its first members where all are too long."""
    state = ""
    for member in ",".join(states).split(","):
        more = f"{state},{member.strip()}" if state else member.strip()
        if len(more) > LONGEST:
            break
        state = more
    return state


# ---- the client's request ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class ClientCall:
    """What an HTTP request says that the router does not know: whose trace it is part of, and what was asked for."""

    context: TraceContext
    operation: str  # gen_ai.operation.name
    server: tuple[str, int] | None = None  # address and port that were asked
    model: str = ""
    streamed: bool = False


client_call: ContextVar[ClientCall | None] = ContextVar("client_call", default=None)


@contextmanager
def called(call: ClientCall) -> Iterator[None]:
    """Requests generated inside are part of this call."""
    token = client_call.set(call)
    try:
        yield
    finally:
        client_call.reset(token)


def tell_call(model: str, streamed: bool) -> None:
    """What the body has said of the call that this task serves."""
    call = client_call.get()
    if call is not None:
        call.model, call.streamed = model, streamed
