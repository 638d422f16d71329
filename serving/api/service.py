"""What every endpoint whose requests go to workers has in common: what it needs, and the frame of its answers.

It knows neither dialects nor what is generated: bodies are served by those that derive from `ServedResponse`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from starlette.datastructures import Headers, State
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.body import ClientGoneError, read_body
from serving.api.body_work import BodyWork
from serving.api.callers import ApiCaller
from serving.api.embedding_plan import EmbeddingPlan
from serving.api.explain import RequestNames
from serving.api.fields import IgnoredFields
from serving.api.grammar_gate import GrammarGate
from serving.api.in_flight import InFlightRequests
from serving.api.plan import RequestHead, ResponsePlan
from serving.api.rate_limit import LimitReservation, RateLimiter
from serving.api.settings import ApiObserver, PlacementLog
from serving.config import HttpConfig
from serving.errors import DeadlineExceeded, MillraceError
from serving.messages import FinishReason, Generate, Request
from serving.text.tokenizer import Tokenizer
from serving.tracing import ClientCall, called, context_of, recording

PLACEMENT, DOWNGRADE, DEGRADED = "x-millrace-placement", "x-millrace-downgrade", "x-millrace-degraded"
IGNORED = "x-millrace-ignored"
RATE_LIMITED = 429
_UNSHOWN = re.compile(r"[^A-Za-z0-9._:-]")  # in a header's words

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What all endpoints share whose requests go to workers."""

    generate: Generate
    tokenizer: Tokenizer
    config: HttpConfig
    in_flight: InFlightRequests
    observer: ApiObserver
    clock: Callable[[], float]  # the router's
    limits: RateLimiter
    placements: PlacementLog
    names: RequestNames
    bodies: BodyWork
    grammars: GrammarGate


def tell_ignored(ignored: IgnoredFields, answer_headers: dict[str, str], observer: ApiObserver) -> None:
    """Name what was ignored of a body in the headers of its answer, and count it."""
    if ignored.counted:
        answer_headers[IGNORED] = ignored.header()
    for name in ignored.counted.values():
        observer.field_ignored(name)


def _placement_headers(placements: PlacementLog, request_id: str) -> dict[str, str]:
    """Where the request with this id went, as headers of the answer; none where nothing is known."""
    found = placements.placement(request_id)
    if found is None:
        return {}
    shown = {name: _UNSHOWN.sub("_", word) for name, word in found.items()}
    headers = {PLACEMENT: ";".join(f"{name}={shown[name]}" for name in ("prefill", "decode", "reason"))}
    for header, name in ((DOWNGRADE, "downgrade"), (DEGRADED, "degraded")):
        if shown.get(name):
            headers[header] = shown[name]
    return headers


def tell_refusal(error: MillraceError, answer_headers: dict[str, str], observer: ApiObserver) -> None:
    """Count an answer that is this error, and name in its headers what of the body was ignored, where that is known."""
    if isinstance(error.ignored, IgnoredFields):
        tell_ignored(error.ignored, answer_headers, observer)
    observer.request_refused(status=error.status)


@contextmanager
def reserved(service: Service, caller: ApiCaller, answer_headers: dict[str, str]) -> Iterator[LimitReservation]:
    """Hold a request of the caller's limits, and in the end give back what was not used. Raises RateLimited.

    The headers say what is left either way.
    """
    now = service.clock()
    account = service.limits.account(caller.account, caller.limits, now)
    try:
        held = service.limits.open(caller.account, caller.limits, now)
    finally:
        answer_headers |= account.headers(now)
    try:
        yield held
    except Exception as error:
        held.void = not _is_the_clients(error)
        raise
    finally:
        now = service.clock()
        held.close(now)
        answer_headers |= held.headers(now)


class ServedResponse(Response):
    """The ASGI response of such an endpoint. It reads the body itself, in bounds, and watches for a hang-up.

    `state` is the HTTP request's, as serving.api.middleware made it. `operation` is the word for what is asked for in
    OpenTelemetry's conventions.
    """

    operation = "chat"

    def __init__(self, service: Service, headers: Headers, state: State) -> None:
        super().__init__()
        self._service = service
        self._request_headers = headers
        self._caller: ApiCaller = state.caller
        self._head = RequestHead(
            ids=state.ids,
            key=state.key,
            headers=headers,
            arrived=service.clock(),
            rights=self._caller.rights,
        )
        self._answer_headers: dict[str, str] = state.answer_headers
        self._reservation: LimitReservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            with service.in_flight.enter(), self._reserved():
                body = await read_body(receive, self._request_headers, service.config)
                with self._traced(scope):
                    await until_hang_up(receive, self._serve(body, scope, receive, send))
        except ClientGoneError:
            return
        except MillraceError as error:
            tell_refusal(error, self._answer_headers, service.observer)
            raise

    def _traced(self, scope: Scope) -> AbstractContextManager[object]:
        """What is generated within is part of the client's trace."""
        if not recording():
            return nullcontext()
        return called(ClientCall(context_of(self._request_headers.items()), self.operation, scope.get("server")))

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """All of it, once the body is here."""
        raise NotImplementedError

    @contextmanager
    def _reserved(self) -> Iterator[None]:
        with reserved(self._service, self._caller, self._answer_headers) as self._reservation:
            yield

    def _spend(self, plan: ResponsePlan | EmbeddingPlan, tokens: int) -> None:
        """Take what the plan may come to of the caller's tokens, and note its names. Raises TokenRateLimited."""
        now = self._service.clock()
        try:
            self._reservation.spend(tokens, now)
        finally:
            self._answer_headers |= self._reservation.headers(now)
        self._service.names.note(plan, self._head.ids, self._head.key)

    def _tell_placement(self, plan: ResponsePlan | EmbeddingPlan) -> None:
        """The answer's headers say where the request went: its first sequence, where it has several."""
        first = plan.sequences[0].request.request_id
        self._answer_headers |= _placement_headers(self._service.placements, first)


def _is_the_clients(error: Exception) -> bool:
    """A request that ended so counts: what is wrong with it is its own, or its client did not wait for the end."""
    if isinstance(error, ClientGoneError | DeadlineExceeded | HTTPException):
        return True
    return isinstance(error, MillraceError) and error.status < 500 and error.status != RATE_LIMITED


class ObservedSequence:
    """One sequence from its beginning to its end, of which the observer is told once.

    `finish` and `tokens`, those of its output, are how it has ended, as far as is known. A context manager of its own
    and not a generator: every choice of a response has one.
    """

    __slots__ = ("_request", "_service", "finish", "tokens")

    def __init__(self, service: Service, request: Request) -> None:
        self.finish = FinishReason.ERROR
        self.tokens = 0
        self._service = service
        self._request = request

    def __enter__(self) -> Self:
        self._service.observer.request_started(prompt_tokens=len(self._request.prompt))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            deadline = self._request.deadline
            late = deadline is not None and self._service.clock() >= deadline
            self.finish = FinishReason.ERROR if late else FinishReason.ABORT
        self._service.observer.request_finished(finish=self.finish, completion_tokens=self.tokens)


async def until_hang_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end; cancel it, and wait until it has cleaned up, as soon as the client leaves.

    Returns what `work` does. Raises what `work` raises, and `ClientGoneError`.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # does nothing to a task that is done
        await asyncio.wait((working, watching))
    if working.cancelled():
        raise ClientGoneError
    return working.result()


@asynccontextmanager
async def until_deadline(deadline: float | None, clock: Callable[[], float]) -> AsyncIterator[None]:
    """The block ends by the deadline, on this clock: router and workers hold it too, and this is for when they hang.

    Raises DeadlineExceeded.
    """
    seconds = None if deadline is None else max(0.0, deadline - clock())
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the request's deadline has passed", code="deadline") from error


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
