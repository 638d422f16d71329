"""Runs one generation request from its body to its last byte: prepare, generate, write, and one ending for each.

It owns the iterators of `generate`: however it is left, each of them is closed. What is generated and how it is
written are decided elsewhere.
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

from serving.api.body import ClientGoneError, check_headers, read_body
from serving.api.choice import Choice, ChoiceDelta
from serving.api.failures import error_body
from serving.api.frames import FrameWriter, error_frame
from serving.api.in_flight import InFlightRequests
from serving.api.plan import ResponsePlan
from serving.api.prepare import Identity
from serving.api.results import ResultWriter
from serving.api.settings import ApiConfig, ApiObserver
from serving.errors import InternalError, MillraceError
from serving.messages import Delta, FinishReason, Generate
from serving.text.tokenizer import Tokenizer

LARGE_BODY = 8 * 1024  # bytes; a longer body is parsed and tokenized in a thread

T = TypeVar("T")
Emit = Callable[[Choice, ChoiceDelta], Awaitable[None]]

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects the stream before it passes it on
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What endpoints work with."""

    generate: Generate
    tokenizer: Tokenizer
    config: ApiConfig
    in_flight: InFlightRequests
    observer: ApiObserver


async def off_loop(work: Callable[..., T], body: bytes, *arguments: object) -> T:
    """`work(body, …)`, in a thread if the body is so large that others would wait for it."""
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(work, body, *arguments)
    return work(body, *arguments)


class GenerationResponse(Response):
    """The ASGI response of a generation endpoint. It reads the body itself, in bounds, and watches for a hang-up."""

    def __init__(
        self, service: Service, prepare: Callable[[bytes, Identity], ResponsePlan], identity: Identity
    ) -> None:
        super().__init__()
        self._service = service
        self._prepare = prepare
        self._identity = identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        headers = Headers(scope=scope)
        with self._service.in_flight.enter():
            try:
                check_headers(headers)
                body = await read_body(receive, headers, limit=config.max_body_bytes, timeout_s=config.body_timeout_s)
                plan = await off_loop(self._prepare, body, self._identity)
                choices = [Choice(plan, sequence, self._service.tokenizer) for sequence in plan.sequences]
                answer = self._stream if plan.stream else self._collect
                await until_hang_up(receive, answer(plan, choices, scope, receive, send))
            except ClientGoneError:
                return  # nobody is left to answer

    async def _collect(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One JSON object when all choices have ended."""
        writer = ResultWriter(plan, choices, self._service.tokenizer)

        async def keep(choice: Choice, output: ChoiceDelta) -> None:
            writer.add(choice, output)

        await run_choices(self._service, choices, keep)
        await Response(writer.body(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, plan: ResponsePlan, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Events as tokens come. The status waits for the first token, so that a refusal still has one of its own."""
        writer = FrameWriter(plan, choices, self._service.tokenizer)
        stream = EventStream(send)

        async def show(choice: Choice, output: ChoiceDelta) -> None:
            if frames := writer.frames(choice, output):
                await stream.write(frames)

        try:
            await run_choices(self._service, choices, show)
            await stream.close(writer.end())
        except MillraceError as error:
            if not stream.started:
                raise
            await stream.fail(error)
        except Exception:
            if stream.started:
                await stream.fail(InternalError("the server failed on this request"))
            raise


class EventStream:
    """Server-sent events over one ASGI `send`; the response starts with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._opening = asyncio.Lock()
        self.started = False

    async def write(self, frames: bytes) -> None:
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _start(self) -> None:
        async with self._opening:  # several choices may bring their first token at once
            if not self.started:
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM[:]})
                self.started = True

    async def fail(self, error: MillraceError) -> None:
        """End the stream with an error event."""
        await self.close(error_frame(error_body(error)))

    async def close(self, frames: bytes) -> None:
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


async def run_choices(service: Service, choices: Sequence[Choice], emit: Emit) -> None:
    """Generate every choice, all at once. The first failure ends the others and is raised."""
    if len(choices) == 1:
        await _run_choice(service, choices[0], emit)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_run_choice(service, choice, emit))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _run_choice(service: Service, choice: Choice, emit: Emit) -> None:
    """One sequence to its end, told to the observer exactly once however it comes."""
    request, observer = choice.request, service.observer
    observer.request_started(prompt_tokens=len(request.prompt), max_tokens=request.sampling.max_tokens)
    finish = FinishReason.ERROR
    try:
        # `generate` gives asynchronous generators; leaving one early is what cancels its request everywhere.
        async with aclosing(cast("AsyncGenerator[Delta]", service.generate(request))) as deltas:
            async for delta in deltas:
                output = choice.push(delta)
                await emit(choice, output)
                if choice.finish is not None:
                    break
        if choice.finish is None:
            raise InternalError("the generation ended without a reason")
        finish = choice.finish
    except asyncio.CancelledError:
        finish = FinishReason.ABORT
        raise
    finally:
        observer.request_finished(
            finish=finish, prompt_tokens=len(request.prompt), completion_tokens=choice.completion_tokens
        )
