"""Runs one generation request from its body to its last byte: prepare, generate, write, and end exactly once.

It owns the iterators of `generate` and closes each of them on every exit. A delta passes three hands on its way out:
`Choice.push` (text and stop strings), `StreamWriter.frames` (bytes of events), and the ASGI `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from starlette.datastructures import Headers, State
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.body_work import client_of
from serving.api.choice import Choice, ChoiceDelta, choice_of
from serving.api.dialect import Dialect, PreparedRequest, StreamWriter
from serving.api.resumable_stream import MarkedWriter, token_by_token
from serving.api.service import ObservedSequence, ServedResponse, Service, tell_ignored, until_deadline
from serving.errors import InternalError, MillraceError
from serving.messages import Delta
from serving.tracing import tell_call

DeltaSink = Callable[[Choice, ChoiceDelta], Awaitable[None]]  # takes the deltas of all choices of a response

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects the stream before it passes it on
]


class GenerationResponse(ServedResponse):
    """The ASGI response of a generation endpoint."""

    def __init__(self, service: Service, dialect: Dialect, headers: Headers, state: State) -> None:
        super().__init__(service, headers, state)
        self._dialect = dialect
        self.operation = "text_completion" if dialect.path == "/v1/completions" else "chat"

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        service, client = self._service, client_of(scope)
        prepared = await service.bodies.run(self._dialect.prepare, body, self._head, client=client)
        plan = prepared.plan
        tell_ignored(plan.ignored, self._answer_headers, service.observer)
        await service.grammars.check(client, plan.form, self._head.rights.owner)
        self._spend(plan, plan.most_tokens)
        tell_call(plan.model, plan.stream)
        choices = [choice_of(plan, sequence, service.tokenizer) for sequence in plan.sequences]
        try:
            if plan.stream:
                await self._stream(prepared, choices, body, send)
            else:
                await self._collect(prepared, choices, scope, receive, send)
        finally:  # output tokens that did not come do not count towards the limit
            self._reservation.used = plan.prompt_tokens + sum(choice.completion_tokens for choice in choices)

    async def _collect(
        self, prepared: PreparedRequest, choices: Sequence[Choice], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One JSON object when all choices have ended."""
        plan = prepared.plan
        writer = prepared.form.whole(plan, choices, self._service.tokenizer)
        try:
            async with until_deadline(plan.deadline, self._service.clock):
                await run_choices(self._service, choices, writer.add)
        finally:
            self._tell_placement(plan)
        await Response(writer.body(), media_type="application/json")(scope, receive, send)

    async def _stream(self, prepared: PreparedRequest, choices: Sequence[Choice], body: bytes, send: Send) -> None:
        """Events as tokens come. The status waits for the first token, so that a refusal still has one of its own."""
        plan = prepared.plan
        service, writer = self._service, prepared.form.stream(plan, choices, self._service.tokenizer)
        if plan.resumable:
            service = replace(service, generate=token_by_token(service.generate))
            writer = MarkedWriter(writer, plan, body, service.clock)
        stream = EventStream(send, writer, lambda: self._tell_placement(plan))
        try:
            async with until_deadline(plan.deadline, service.clock):
                await run_choices(service, choices, stream.add)
            await stream.end(writer.end())
        except MillraceError as error:
            if not stream.started:
                self._tell_placement(plan)
                raise
            await stream.end(writer.failed(error))
        except Exception:
            if stream.started:
                await stream.end(writer.failed(InternalError("the server failed on this request")))
            raise


class EventStream:
    """Server-sent events over one ASGI `send`; the response starts with the first of them, after `before_start`."""

    def __init__(self, send: Send, writer: StreamWriter, before_start: Callable[[], None]) -> None:
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
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})


async def run_choices(service: Service, choices: Sequence[Choice], sink: DeltaSink) -> None:
    """Generate every choice, all at once. The first failure ends the others and is raised."""
    try:
        if len(choices) == 1:
            await _run_choice(service, choices[0], sink)
            return
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_run_choice(service, choice, sink))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        service.observer.response_finished(most_tokens=max(choice.completion_tokens for choice in choices))


async def _run_choice(service: Service, choice: Choice, sink: DeltaSink) -> None:
    """Generate one sequence to its end."""
    with ObservedSequence(service, choice.request) as end:
        try:
            # `generate` gives asynchronous generators; leaving one early is what cancels its request everywhere.
            async with aclosing(cast("AsyncGenerator[Delta]", service.generate(choice.request))) as deltas:
                async for delta in deltas:
                    await sink(choice, choice.push(delta))
                    if choice.finish is not None:
                        break
        finally:
            end.tokens = choice.completion_tokens
        if choice.finish is None:
            raise InternalError("the generation ended without a reason")
        end.finish = choice.finish
