"""Writes streams that can go on where they broke off: each event has an id, and those that a client has are left out.

The answer is generated again from its beginning, so its events have to be the same however its tokens come: they are
taken one by one. While events are left out, a comment now and then keeps the connection from being given up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import cast

from serving.api.choice import Choice, ChoiceDelta
from serving.api.dialect import StreamWriter
from serving.api.plan import ResponsePlan
from serving.api.resumption import LAST_EVENT, EventMark
from serving.errors import Diverged, MillraceError
from serving.messages import Delta, Generate, Request

MOST_SILENT_SECONDS = 10.0  # proxies and clients give up what is silent for longer, many after a minute
COMMENT = b": generated again up to the last event id\n\n"


def token_by_token(generate: Generate) -> Generate:
    """The same, each token a delta of its own: what is shown is then cut the same way whenever it is generated."""

    async def single(request: Request) -> AsyncGenerator[Delta]:
        async with aclosing(cast("AsyncGenerator[Delta]", generate(request))) as deltas:
            async for delta in deltas:
                for part in _parts(delta):
                    yield part

    def generated(request: Request) -> AsyncIterator[Delta]:
        return single(request)

    return generated


def _parts(delta: Delta) -> Iterator[Delta]:
    last = len(delta.tokens) - 1
    if last <= 0:
        yield delta
        return
    for at, token in enumerate(delta.tokens):
        yield replace(
            delta,
            index=delta.index + at,
            tokens=(token,),
            logprobs=delta.logprobs[at : at + 1],
            finish=delta.finish if at == last else None,
            prompt_logprobs=delta.prompt_logprobs if at == 0 else (),
        )


class MarkedWriter:
    """A StreamWriter around another one, for a stream of one choice whose tokens come one by one."""

    def __init__(self, writer: StreamWriter, plan: ResponsePlan, body: bytes, clock: Callable[[], float]) -> None:
        """`body` is the request's: the events of another one have other ids. `clock` gives seconds."""
        self._writer = writer
        self._created = plan.created
        self._after = plan.after
        self._had = 0 if plan.after is None else plan.after.events
        self._events = 0
        self._digest = blake2b(body, digest_size=8, key=plan.id.encode()[:64])
        self._clock = clock
        self._heard = clock()  # when the client has last been sent something

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """At times a comment in the place of events that are left out. Raises Diverged where those were others."""
        for token in output.tokens:
            self._digest.update(token.to_bytes(8, "little"))
        frames = self._writer.frames(choice, output)
        marked = self._marked(frames) if frames else b""
        return self._comment() if not marked and self._events < self._had else marked

    def _comment(self) -> bytes:
        """Something that is no event, once nothing has been sent for too long."""
        now = self._clock()
        if now - self._heard < MOST_SILENT_SECONDS:
            return b""
        self._heard = now
        return COMMENT

    def end(self) -> bytes:
        """Raises Diverged where the client has been told of more than there is."""
        marked = self._marked(self._writer.end())
        if self._events < self._had:
            raise _diverged()
        return marked

    def failed(self, error: MillraceError) -> bytes:
        """Without an id: the client may ask again for what follows the event before."""
        return self._writer.failed(error)

    def _marked(self, frames: bytes) -> bytes:
        digest, marked = self._digest.hexdigest(), []
        for event in frames.split(b"\n\n")[:-1]:
            self._events += 1
            if self._events > self._had:
                mark = EventMark(self._created, self._events, digest)
                marked.append(b"id: %b\n%b\n\n" % (str(mark).encode(), event))
            elif self._after is not None and self._events == self._had and digest != self._after.digest:
                raise _diverged()
        return b"".join(marked)


def _diverged() -> Diverged:
    told = (
        "the answer came out another way than the stream that is to go on: key or body is not the same to the byte, "
        "or another model or precision serves by now; "
        f"send the request without {LAST_EVENT} to have it from its beginning"
    )
    return Diverged(told, param=LAST_EVENT, code="diverged")
