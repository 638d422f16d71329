"""Runs one generation request from its body to its last byte: prepare, generate, write, and end exactly once.

It owns the iterators of `generate` and closes each of them on every exit. A delta passes three hands on its way out:
`Choice.push` (text and stop strings), `SseWriter.frames` (bytes of events), and the ASGI `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.body import ClientGoneError, read_body
from serving.api.choice import Choice, ChoiceDelta
from serving.api.failures import error_body
from serving.api.in_flight import InFlightRequests
from serving.api.plan import RequestIds, ResponsePlan
from serving.api.results import ResultWriter
from serving.api.settings import ApiObserver
from serving.api.sse import SseWriter, error_frame
from serving.config import HttpConfig
from serving.errors import InternalError, MillraceError
from serving.messages import Delta, FinishReason, Generate
from serving.text.tokenizer import Tokenizer

LARGE_BODY = 8 * 1024  # bytes; a longer body is parsed and tokenized in a thread

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


async def off_loop(work: Callable[..., T], body: bytes, *arguments: object) -> T:
    """`work(body, …)`, in a thread if the body is longer than LARGE_BODY, since the event loop would wait for it."""
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(work, body, *arguments)
    return work(body, *arguments)


class GenerationResponse(Response):
    """The ASGI response of a generation endpoint. It reads the body itself, in bounds, and watches for a hang-up."""

    def __init__(self, service: Service, prepare: Callable[[bytes, RequestIds], ResponsePlan], ids: RequestIds) -> None:
        super().__init__()
        self._service = service
        self._prepare = prepare
        self._ids = ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._service.in_flight.enter():
                body = await read_body(receive, Headers(scope=scope), self._service.config)
                plan = await off_loop(self._prepare, body, self._ids)
                choices = [Choice(plan, sequence, self._service.tokenizer) for sequence in plan.sequences]
                answer = self._stream if plan.stream else self._collect
                await until_hang_up(receive, answer(plan, choices, scope, receive, send))
        except ClientGoneError:
            return
        except MillraceError as error:
            self._service.observer.request_refused(status=error.status)
            raise

    async def _collect(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One JSON object when all choices have ended."""
        writer = ResultWriter(plan, choices, self._service.tokenizer)
        await run_choices(self._service, choices, writer.add)
        await Response(writer.body(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Events as tokens come. The status waits for the first token, so that a refusal still has one of its own."""
        writer = SseWriter(plan, choices, self._service.tokenizer)
        stream = EventStream(send, writer)
        try:
            await run_choices(self._service, choices, stream.add)
            await stream.end(writer.end())
        except MillraceError as error:
            if not stream.started:
                raise
            await stream.end(error_frame(error_body(error)))
        except Exception:
            if stream.started:
                await stream.end(error_frame(error_body(InternalError("the server failed on this request"))))
            raise


class EventStream:
    """Server-sent events over one ASGI `send`; the response starts with the first of them."""

    def __init__(self, send: Send, writer: SseWriter) -> None:
        self._send = send
        self._writer = writer
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
        finish = FinishReason.ABORT
        raise
    finally:
        observer.request_finished(finish=finish, completion_tokens=choice.completion_tokens)
