"""Runs one generation request from its body to its last byte: prepare, generate, write, and end exactly once.

It owns the iterators of `generate` and closes each of them on every exit. A delta passes three hands on its way out:
`Choice.push` (text and stop strings), `SseWriter.frames` (bytes of events), and the ASGI `send`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.datastructures import Headers, State
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.body import ClientGoneError, read_body
from serving.api.choice import Choice, ChoiceDelta, choice_of
from serving.api.explain import RequestNames
from serving.api.failures import error_body
from serving.api.fields import IgnoredFields
from serving.api.in_flight import InFlightRequests
from serving.api.plan import RequestHead, ResponsePlan
from serving.api.rate_limit import RateLimiter
from serving.api.results import ResultWriter
from serving.api.settings import ApiObserver, PlacementLog
from serving.api.sse import SseWriter, error_frame, sse_writer
from serving.config import HttpConfig
from serving.errors import DeadlineExceeded, InternalError, MillraceError
from serving.messages import Delta, FinishReason, Generate
from serving.text.tokenizer import Tokenizer

LARGE_BODY = 8 * 1024  # bytes; a longer body is parsed and tokenized in a thread
COMPILED = (b"_format", b"guided_", b"structured_outputs", b'"tools', b"\\u")  # may bring a grammar
PLACEMENT, DOWNGRADE, DEGRADED = "x-millrace-placement", "x-millrace-downgrade", "x-millrace-degraded"
IGNORED = "x-millrace-ignored"
_UNSHOWN = re.compile(r"[^A-Za-z0-9._:-]")  # in a header's words

T = TypeVar("T")
DeltaSink = Callable[[Choice, ChoiceDelta], Awaitable[None]]  # takes the deltas of all choices of a response

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects the stream before it passes it on
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What both generation endpoints share."""

    generate: Generate
    tokenizer: Tokenizer
    config: HttpConfig
    in_flight: InFlightRequests
    observer: ApiObserver
    clock: Callable[[], float]  # the router's
    limits: RateLimiter
    placements: PlacementLog
    names: RequestNames


async def off_loop(work: Callable[..., T], body: bytes, *arguments: object) -> T:
    """`work(body, …)`, in a thread if the event loop would wait for it: a long body, or one with a grammar."""
    if len(body) > LARGE_BODY or any(word in body for word in COMPILED):
        return await asyncio.to_thread(work, body, *arguments)
    return work(body, *arguments)


def tell_ignored(ignored: IgnoredFields, answer_headers: dict[str, str], observer: ApiObserver) -> None:
    """Name what was ignored of a body in the headers of its answer, and count it."""
    if ignored.counted:
        answer_headers[IGNORED] = ignored.header()
    for name in ignored.counted.values():
        observer.field_ignored(name)


class GenerationResponse(Response):
    """The ASGI response of a generation endpoint. It reads the body itself, in bounds, and watches for a hang-up.

    `state` is the HTTP request's, as serving.api.middleware made it.
    """

    def __init__(
        self, service: Service, prepare: Callable[[bytes, RequestHead], ResponsePlan], headers: Headers, state: State
    ) -> None:
        super().__init__()
        self._service = service
        self._prepare = prepare
        self._request_headers = headers
        self._head = RequestHead(ids=state.ids, key=state.key, headers=headers, arrived=service.clock())
        self._answer_headers: dict[str, str] = state.answer_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, key = self._service, self._head.key
        try:
            with service.in_flight.enter():
                self._limit(lambda now: service.limits.request(key, now))
                body = await read_body(receive, self._request_headers, service.config)
                plan = await off_loop(self._prepare, body, self._head)
                tell_ignored(plan.ignored, self._answer_headers, service.observer)
                self._limit(lambda now: service.limits.spend(key, plan.most_tokens, now))
                service.names.note(plan, self._head.ids, key)
                choices = [choice_of(plan, sequence, service.tokenizer) for sequence in plan.sequences]
                answer = self._stream if plan.stream else self._collect
                with self._refund(plan, choices):
                    await until_hang_up(receive, answer(plan, choices, scope, receive, send))
        except ClientGoneError:
            return
        except MillraceError as error:
            service.observer.request_refused(status=error.status)
            raise

    def _limit(self, take: Callable[[float], None]) -> None:
        """Raises RateLimited; the headers of the answer say what is left either way."""
        now = self._service.clock()
        try:
            take(now)
        finally:
            self._answer_headers |= self._service.limits.headers(self._head.key, now)

    @contextmanager
    def _refund(self, plan: ResponsePlan, choices: Sequence[Choice]) -> Iterator[None]:
        """Output tokens that did not come do not count towards the limit."""
        try:
            yield
        finally:
            came = plan.prompt_tokens + sum(choice.completion_tokens for choice in choices)
            self._service.limits.refund(self._head.key, plan.most_tokens - came, self._service.clock())

    def _tell_placement(self, plan: ResponsePlan) -> None:
        """The answer's headers say where the request went: its first sequence, where it has several."""
        found = self._service.placements.placement(plan.sequences[0].request.request_id)
        if found is None:
            return
        shown = {name: _UNSHOWN.sub("_", word) for name, word in found.items()}
        words = (f"{name}={shown[name]}" for name in ("prefill", "decode", "reason"))
        self._answer_headers[PLACEMENT] = ";".join(words)
        for header, name in ((DOWNGRADE, "downgrade"), (DEGRADED, "degraded")):
            if shown.get(name):
                self._answer_headers[header] = shown[name]

    async def _collect(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One JSON object when all choices have ended."""
        writer = ResultWriter(plan, choices, self._service.tokenizer)
        try:
            async with until_deadline(plan.deadline, self._service.clock):
                await run_choices(self._service, choices, writer.add)
        finally:
            self._tell_placement(plan)
        await Response(writer.body(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Events as tokens come. The status waits for the first token, so that a refusal still has one of its own."""
        writer = sse_writer(plan, choices, self._service.tokenizer)
        stream = EventStream(send, writer, lambda: self._tell_placement(plan))
        try:
            async with until_deadline(plan.deadline, self._service.clock):
                await run_choices(self._service, choices, stream.add)
            await stream.end(writer.end())
        except MillraceError as error:
            if not stream.started:
                self._tell_placement(plan)
                raise
            await stream.end(error_frame(error_body(error)))
        except Exception:
            if stream.started:
                await stream.end(error_frame(error_body(InternalError("the server failed on this request"))))
            raise


class EventStream:
    """Server-sent events over one ASGI `send`; the response starts with the first of them, after `before_start`."""

    def __init__(self, send: Send, writer: SseWriter, before_start: Callable[[], None]) -> None:
        self._send = send
        self._writer = writer
        self._before_start = before_start
        self._opening = asyncio.Lock()
        self.started = False

    async def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        """Send what `delta` shows, if it shows anything yet."""
        if frames := self._writer.frames(choice, delta):
            if not self.started:
                await self._start()
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _start(self) -> None:
        async with self._opening:  # several choices may bring their first token at once
            if not self.started:
                self._before_start()
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM[:]})
                self.started = True

    async def end(self, frames: bytes) -> None:
        """End the stream with these."""
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})


async def until_hang_up(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; cancel it, and wait until it has cleaned up, as soon as the client leaves.

    Raises what `work` raises, and `ClientGoneError`.
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
    working.result()


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


async def run_choices(service: Service, choices: Sequence[Choice], sink: DeltaSink) -> None:
    """Generate every choice, all at once. The first failure ends the others and is raised."""
    if len(choices) == 1:
        await _run_choice(service, choices[0], sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_run_choice(service, choice, sink))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _run_choice(service: Service, choice: Choice, sink: DeltaSink) -> None:
    """Generate one sequence to its end; the observer is told of the end exactly once."""
    request, observer = choice.request, service.observer
    observer.request_started(prompt_tokens=len(request.prompt))
    finish = FinishReason.ERROR
    try:
        # `generate` gives asynchronous generators; leaving one early is what cancels its request everywhere.
        async with aclosing(cast("AsyncGenerator[Delta]", service.generate(request))) as deltas:
            async for delta in deltas:
                await sink(choice, choice.push(delta))
                if choice.finish is not None:
                    break
        if choice.finish is None:
            raise InternalError("the generation ended without a reason")
        finish = choice.finish
    except asyncio.CancelledError:
        late = request.deadline is not None and service.clock() >= request.deadline
        finish = FinishReason.ERROR if late else FinishReason.ABORT
        raise
    finally:
        observer.request_finished(finish=finish, completion_tokens=choice.completion_tokens)
