"""gRPC servers, channels, the cluster key, and errors that keep their type across processes.

A server raises errors of `serving.errors`; the client raises the same class with the same fields. Any other failure
of a call (a refused connection, a reset, a timeout) is raised as WorkerLost.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # we only fork to exec; the support would log about it

import grpc
from grpc import aio

from serving.errors import NEVER_SENT, MillraceError, Unauthorized, WorkerLost
from serving.grpc_tls import GrpcTls, Identity
from serving.proto import millrace_pb2 as pb
from serving.tracing import call_headers
from serving.wire import error_from_pb, error_to_pb

log = logging.getLogger(__name__)

MAX_MESSAGE = 256 << 20  # bytes; the largest message is a prompt's token ids or one KV chunk
UNANSWERED_MS = 15_000  # a peer that answers no ping for so long is gone; one that was stopped for 10 s is not
INTERNAL = grpc.StatusCode.INTERNAL.name
# How gRPC begins what it says of a call that it could not send: nobody listens, or the name has no address.
NO_CONNECTION = ("failed to connect", "errors resolving")
# A server that refuses a client's certificate, or hears no TLS from it, ends the connection, and gRPC tells no more.
ENDED = ("Socket closed", "Connection reset by peer", "Broken pipe")
MAYBE_REFUSED = "; it may be gone, or have refused our certificate, or want TLS"
ASKED_WHY = 1.0  # seconds a peer has to say why it ended a stream
# Every worker has this method, also one of an earlier version, which refuses strangers only what it has; servers of
# this version refuse it to them whether they have it or not.
KEY_CHECK = "/millrace.v1.Worker/GetAudit"
LONGEST_MESSAGE = 2000  # bytes of an error: it travels in headers, escaped, and gRPC drops those over 16 KB
_ERROR_KEY = "millrace-error-bin"
_AUTH_KEY = "authorization"
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", UNANSWERED_MS),
    ("grpc.http2.ping_timeout_ms", UNANSWERED_MS),  # a minute by default, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 250),  # a restarted peer is reached soon; calls before that fail at once
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class _KeyCheck(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call that does not carry the cluster key, those of methods that nobody serves among them."""

    def __init__(self, key: str):
        self.expected = f"Bearer {key}".encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = next((value for name, value in details.invocation_metadata or () if name == _AUTH_KEY), "")
        if hmac.compare_digest(str(given).encode(), self.expected):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # which reads no request: it fits calls of every kind


async def _refuse(requests: Any, context: aio.ServicerContext) -> None:
    await _abort(context, Unauthorized("the cluster key is missing or wrong; start every service with the same one"))


def server(cluster_key: str | None = None, tls: GrpcTls | None = None) -> aio.Server:
    """A gRPC server; with a key, calls without it are refused. Have it `listen` with the same `tls`."""
    options = [*_OPTIONS, *(tls.server_options() if tls is not None else ())]
    return aio.server(interceptors=[_KeyCheck(cluster_key)] if cluster_key else None, options=options)


def listen(on: aio.Server, host: str, port: int, tls: GrpcTls | None = None) -> int:
    """Have the server listen on host:port, 0 for a free one; the port. Raises ValueError when it cannot be had.

    With `tls` it answers those alone whose certificates are of its authorities.
    """
    where = f"{host}:{port}"
    try:
        bound: int = on.add_insecure_port(where) if tls is None else on.add_secure_port(where, tls.server_credentials())
    except RuntimeError as error:
        raise ValueError(f"gRPC cannot listen on {host}:{port}; choose another --grpc-host or --grpc-port") from error
    return bound


def handle(on: aio.Server, path: str, handler: Any) -> None:
    """Have `handler` answer the method `/service/method` instead of what the service's own code registered for it."""
    _, service, method = path.split("/")
    on.add_registered_method_handlers(service, {method: handler})


class Caller:
    """A channel and the metadata its calls carry. `metadata` goes into every stub call; ask for it at each.

    Ask for `channel` at every call: with `tls` it is another one when the certificates have changed.
    """

    def __init__(self, address: str, cluster_key: str | None = None, tls: GrpcTls | None = None):
        self.address = address
        self._key: tuple[tuple[str, str], ...] = ((_AUTH_KEY, f"Bearer {cluster_key}"),) if cluster_key else ()
        self._tls = tls
        self._identity = tls.current() if tls is not None else None
        self._channel = self._opened()
        self._closed = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The cluster key, and whose trace the call is part of."""
        return self._key + call_headers()

    @property
    def channel(self) -> aio.Channel:
        """The last one is let go, not closed: its calls go on to their ends, and then gRPC closes it."""
        if self._tls is not None and not self._closed and (now := self._tls.current()) is not self._identity:
            self._identity = now
            self._channel = self._opened()
        return self._channel

    @property
    def identity(self) -> Identity | None:
        """By which `channel` was made; None without TLS."""
        return self._identity

    def _opened(self) -> aio.Channel:
        if self._tls is None or self._identity is None:
            return aio.insecure_channel(self.address, options=_OPTIONS)
        options = [*_OPTIONS, *self._tls.channel_options()]
        return aio.secure_channel(self.address, self._tls.channel_credentials(self._identity), options=options)

    async def why(self, broken: MillraceError) -> MillraceError:
        """What ended a stream, as far as a call of one message tells: Unauthorized, or the error it ended with.

        A stream that is refused while a message is on its way may end as an internal error, without what the other
        end said: https://github.com/grpc/grpc/issues/36066.
        """
        if broken.code != INTERNAL:
            return broken
        ask = self.channel.unary_unary(KEY_CHECK)
        try:
            with asking(self.address):
                await ask(b"", metadata=self.metadata, timeout=ASKED_WHY)
        except Unauthorized as told:
            return told
        except MillraceError:
            pass  # which tells no more
        return broken

    async def close(self) -> None:
        """Calls that come later fail, whatever becomes of the certificates."""
        self._closed = True
        await self._channel.close()


async def _abort(context: aio.ServicerContext, error: MillraceError) -> NoReturn:
    code = getattr(grpc.StatusCode, error.grpc_code)
    message = error_to_pb(error)
    message.message = message.message.encode()[:LONGEST_MESSAGE].decode(errors="ignore")
    packed = base64.b64encode(message.SerializeToString())
    await context.abort(code, message.message, ((_ERROR_KEY, packed),))
    raise AssertionError("abort returns never")


@asynccontextmanager
async def answering(context: aio.ServicerContext) -> AsyncIterator[None]:
    """Around a servicer's body: a MillraceError ends the call with its gRPC code, and its fields reach the client."""
    try:
        yield
    except MillraceError as error:
        await _abort(context, error)


@contextmanager
def asking(peer: str) -> Any:
    """Around a client's call: what the server raised is raised here; a broken call is WorkerLost."""
    try:
        yield
    except aio.AioRpcError as error:
        raise _from_status(error, peer) from error
    except aio.UsageError as error:  # a stream that the other side has ended
        raise WorkerLost(f"{peer} ended the call: {error}") from error
    except asyncio.InvalidStateError as error:
        raise WorkerLost(f"{peer} ended the call") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise WorkerLost(f"the channel to {peer} was closed") from error  # this task was not cancelled: the call was


def refused_by_tls(error: MillraceError) -> bool:
    """True if certificates may be why a call failed: as far as gRPC tells."""
    return error.message.endswith(MAYBE_REFUSED) or "handshake failed" in error.message


def _from_status(error: aio.AioRpcError, peer: str) -> MillraceError:
    for name, value in error.trailing_metadata() or ():
        if name == _ERROR_KEY:
            message = pb.Error()
            message.ParseFromString(base64.b64decode(value))
            return error_from_pb(message)
    told, details = error.code().name, error.details() or ""
    # The status alone does not tell a call that had no connection from one that lost it.
    code = NEVER_SENT if details.startswith(NO_CONNECTION) else told
    hint = MAYBE_REFUSED if details.endswith(ENDED) else ""
    return WorkerLost(f"{peer}: {told.lower().replace('_', ' ')}: {details}{hint}", code=code)
