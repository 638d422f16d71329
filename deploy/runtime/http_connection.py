"""A connection of the HTTP server within bounds of number, size and time, before anything of a request is believed.

To the app every end that the server makes looks as if the client had hung up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from functools import partial
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deploy.runtime.connection_table import ConnectionEnd, ConnectionTable
from deploy.runtime.http_refusals import RESPONSES
from deploy.runtime.send_watch import SendWatch
from serving.addresses import network_of
from serving.config import HttpConfig

log = logging.getLogger(__name__)

SLICE_BYTES = 16 << 10  # parsed between two looks at how long the headers have become
MOST_AHEAD = 8  # requests that wait on a connection for the one before them
MOST_BYTES_AHEAD = 256 << 10  # of their bodies
# Each piece of a body is a call for us, however small it is: bodies of more pieces than that have larger ones.
MANY_PIECES = 1024
LEAST_PIECE_BYTES = 32
LINGER_S = 2.0  # for which a client is listened to whose last answer has been sent
LINGER_BYTES = 32 << 20
_FRAMING = (b"content-length", b"transfer-encoding")
_CLOSE = (b"connection", b"close")


class _RefusedError(Exception):
    """Leaves a callback of the parser, which then takes nothing more."""

    def __init__(self, end: ConnectionEnd):
        super().__init__(end.value)
        self.end = end


class Connection(Hashable, Protocol):
    """What a table of connections holds: one that can be ended to make room."""

    def abort(self) -> None: ...


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol, with the bounds of an `HttpConfig`. All connections of a server share a `table`.

    One request at a time is answered, in the order they came. While none is, one timer runs: to the end of the
    headers, or to the next request. A refusal that comes while an answer is under way is sent after it.
    """

    def __init__(self, *arguments: Any, limits: HttpConfig, table: ConnectionTable[Connection], **more: Any):
        super().__init__(*arguments, **more)
        self.limits = limits
        self.table = table
        self.before: Connection | None = None  # what stood for it in the table until it was made
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._in_head = False
        self._head_bytes = 0  # of the headers of the request that arrives, as far as the parser has told them
        self._head_count = 0
        self._body_bytes = 0
        self._body_pieces = 0
        self._untold = 0  # bytes the parser has taken since it last told of anything
        self._framing = b""  # headers that announce the body of a request which offers another protocol
        self._silent = False  # the parser is being told of that body
        self._refusal: ConnectionEnd | None = None  # to be answered once those before it have been
        self._deaf = False  # whatever still arrives is thrown away
        self._thrown = 0
        self._early = False  # an answer has begun before the body had come
        self._timer: asyncio.TimerHandle | None = None
        self._timer_end = ConnectionEnd.SILENT

    # ---- the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watch = SendWatch(self.transport, self.limits.send_timeout, self._unread)
        if self.before is not None:
            self.table.leave(self.before)
            self.before = None
        admission = self.table.admit(self, network_of(self.client[0] if self.client else ""))
        if admission.evicted is not None:
            admission.evicted.abort()
        if admission.refused is not None:
            self._deaf = True
            self.transport.write(RESPONSES[admission.refused])
            self.transport.close()
        else:
            self._wait_for(ConnectionEnd.SILENT, self.limits.header_timeout)

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._throw_away(len(data))
            return
        if self._running is None:
            self._headers_begin()
        try:
            for start in range(0, len(data), SLICE_BYTES):
                self._feed(data[start : start + SLICE_BYTES])
        except _RefusedError as refused:
            self._refuse(refused.end)
        except httptools.HttpParserError as error:
            ours = error.__context__
            self._refuse(ours.end if isinstance(ours, _RefusedError) else ConnectionEnd.MALFORMED)

    def eof_received(self) -> None:
        """The client has left, or wants to hear no more than what was written: the transport closes after that."""
        self.pipeline.clear()
        self._end_running()
        self._answered()
        self.watch.closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.leave(self)
        self._stop_timer()
        self.watch.end()
        self.pipeline.clear()
        self._end_running()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch.start()

    def resume_writing(self) -> None:
        self.watch.stop()
        super().resume_writing()
        if self._running is None:
            self._answered()
        if self.transport.is_closing():
            self.watch.closing()  # what is left fits our buffer, and may stay there

    # ---- the parser's side

    def _feed(self, data: bytes) -> None:
        self._untold += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            self._feed(data[upgrade.args[0] :])
        if self._head_bytes + self._untold > self.limits.max_header_size:  # chunk extensions and trailers as well
            raise _RefusedError(ConnectionEnd.HEADER_SIZE)

    def _decline_upgrade(self) -> None:
        """The client offers another protocol, such as h2c: its request is one of HTTP/1.1, and so are those after it.

        The parser takes nothing more, and believes that such a request has no body. Another one is told of the body.
        """
        self.parser = httptools.HttpRequestParser(self)
        framing, self._framing = self._framing, b""
        if framing:
            self._silent = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")

    def on_message_begin(self) -> None:
        if self._silent:
            return
        self._in_head = True
        self._head_bytes = self._head_count = self._untold = 0
        self._body_bytes = self._body_pieces = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._silent:
            return
        self._told(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._silent:
            return
        self._head_count += 1
        if self._head_count > self.limits.max_header_count:
            raise _RefusedError(ConnectionEnd.HEADER_COUNT)
        self._told(len(name) + len(value) + 4)
        if self._in_head:  # else it is a trailer, which says nothing
            super().on_header(name, value)

    def _told(self, size: int) -> None:
        self._untold = 0
        self._head_bytes += size
        if self._head_bytes > self.limits.max_header_size:
            raise _RefusedError(ConnectionEnd.HEADER_SIZE)

    def on_headers_complete(self) -> None:
        if self._silent:
            self._silent = False
            return
        if len(self.pipeline) >= MOST_AHEAD:
            raise _RefusedError(ConnectionEnd.PIPELINED)
        self._in_head = False
        self._untold = 0
        super().on_headers_complete()
        if self.parser.should_upgrade():
            fields = (name + b": " + value + b"\r\n" for name, value in self.headers if name in _FRAMING)
            self._framing = b"".join(fields)
        self.flow.resume_reading()  # else nobody would hear that the client leaves

    def on_body(self, body: bytes) -> None:
        self._untold = 0
        self._body_bytes += len(body)
        self._body_pieces += 1
        if self._body_pieces > max(MANY_PIECES, self._body_bytes // LEAST_PIECE_BYTES):
            raise _RefusedError(ConnectionEnd.BODY_PIECES)
        super().on_body(body)
        if self.pipeline:
            if sum(len(cycle.body) for cycle, _ in self.pipeline) > MOST_BYTES_AHEAD:
                raise _RefusedError(ConnectionEnd.PIPELINED)
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._untold = 0
        if not self._framing:
            super().on_message_complete()

    # ---- one request after the other

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._stop_timer()
        self.table.busy(self)
        super()._start_asgi_task(cycle, partial(self._answer, cycle, app))

    async def _answer(self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Run the app. An answer that begins before the body has come is the last one, and the client is told so."""

        async def send_early(message: Any) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:
                self._early = True
                told = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"connection"]
                await send({**message, "headers": [*told, _CLOSE]})
                cycle.keep_alive = True  # the connection is not closed over unread bytes: see `_linger`
            else:
                await send(message)

        try:
            await app(scope, receive, send_early)
        finally:
            if self._running is cycle and cycle.response_started:  # it broke off, and nothing else tells us so
                self._running = None
                self._answered()
                self._close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            self._answered()
            self.watch.closing()
        elif self._early:
            self.table.ended[ConnectionEnd.BODY_UNREAD] += 1
            self._linger()
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._say(self._refusal)
        else:
            self.flow.resume_reading()
            if self._in_head:
                self._wait_for(ConnectionEnd.HEADER_TIMEOUT, self.limits.header_timeout)
            else:
                self._wait_for(ConnectionEnd.KEEP_ALIVE, self.limits.keep_alive_timeout)

    def shutdown(self) -> None:
        """The server stops: the request that is being answered is the last."""
        self.pipeline.clear()
        if self._running is None:
            self._close()
        else:
            self._running.keep_alive = False

    def _answered(self) -> None:
        """No request is being answered. One whose answer is larger than what waits for the client is idle when the
        client has taken the most of it: to make room, it would be cut off.
        """
        if not self.flow.write_paused:
            self.table.idle(self)

    def _close(self) -> None:
        """End it as soon as the client has what was written, or takes nothing of that any more."""
        if not self.transport.is_closing():
            self.transport.close()
        self.watch.closing()

    def _end_running(self) -> None:
        """For the request that is being answered, the client has left."""
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
            self._running = None

    # ---- refusals and timers

    def _refuse(self, end: ConnectionEnd) -> None:
        """Nothing more is parsed. What was being received gets no other answer; what came before it gets its own."""
        if self.transport.is_closing():
            return
        self._deaf = True
        self._stop_timer()
        if not self._in_head and self.cycle is not None and self.cycle.more_body:
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            elif self._running is self.cycle:
                begun = self.cycle.response_started
                self._end_running()
                if begun:
                    self.table.ended[end] += 1
                    self._answered()
                    self._close()
                    return
        if self._running is None:
            self._say(end)
        else:
            self._refusal = end

    def _say(self, end: ConnectionEnd) -> None:
        self.table.ended[end] += 1
        self.transport.write(RESPONSES[end])
        self._linger()

    def _linger(self) -> None:
        """Close after the last answer. A connection closed over unread bytes is reset, and a reset can take the answer
        away from the client: so the end is said first, and what arrives is thrown away for a moment.
        """
        self._deaf = True
        self.table.idle(self)
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except NotImplementedError:  # TLS has no half of a connection: closing says the end, and takes what still comes
            self.transport.close()
        except OSError:
            pass  # the client has reset it: the transport is about to hear
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _throw_away(self, size: int) -> None:
        self._thrown += size
        if self._thrown > LINGER_BYTES:
            self.transport.abort()

    def _headers_begin(self) -> None:
        """Bytes have come while no request is answered. They do not put off the end of a time that runs already."""
        if self._timer_end is ConnectionEnd.SILENT:
            self._timer_end = ConnectionEnd.HEADER_TIMEOUT
        elif self._timer_end is ConnectionEnd.KEEP_ALIVE:
            self._wait_for(ConnectionEnd.HEADER_TIMEOUT, self.limits.header_timeout)

    def _wait_for(self, end: ConnectionEnd, seconds: float) -> None:
        self._stop_timer()
        self._timer_end = end
        self._timer = self.loop.call_later(seconds, self._late)
        self._answered()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._timer_end is ConnectionEnd.HEADER_TIMEOUT:
            self._refuse(ConnectionEnd.HEADER_TIMEOUT)
        elif self.flow.write_paused:  # it still takes the answer before: its own time goes on from there
            self._wait_for(ConnectionEnd.KEEP_ALIVE, self.limits.keep_alive_timeout)
        else:
            self.table.ended[self._timer_end] += 1
            self._close()

    def _unread(self) -> None:
        self.table.ended[ConnectionEnd.SEND_TIMEOUT] += 1
        log.info("a client took nothing of its answer for %g s: its connection is broken", self.limits.send_timeout)
        self.transport.abort()
