"""An ASGI application that passes HTTP requests on to the router's own port, and its answers back as they come.

It adds nothing and keeps nothing: keys, limits and errors are the router's. It knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import quote

from serving.api.body import ClientGoneError
from serving.api.failures import error_response
from serving.api.service import until_hang_up
from serving.errors import Unavailable

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
"""As ASGI has them."""

# Of one connection alone, which here are two (RFC 9110, 7.6.1); `expect` was answered by who took the request.
OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
OF_THE_SERVER = frozenset({b"date", b"server", b"x-request-id"})  # Ray Serve's proxy writes these, the id as it came
FORWARDED = b"x-forwarded-for"  # the router believes it of who asks on loopback
NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # what the client has not sent
WAIT_SECONDS = 5.0  # for a connection on this host


class RelayedProcess(Protocol):
    """A process that answers HTTP at `url`, from the end of `start` to `stop`."""

    url: str

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class RouterRelay:
    """The application. It starts the router's process when its own server starts, and stops it at its end."""

    def __init__(self, router: RelayedProcess):
        self.router = router
        self._session: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        """Raises what the start raises, which its server tells."""
        import aiohttp

        await receive()
        await self.router.start()
        # A connection for each request: one that is kept may be closed by the router as the next request is sent.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=WAIT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=NOT_ADDED,
        )
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()
        finally:
            await self._session.close()
            await self.router.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the answer has ended or the client has left. Raises what breaks an answer that has begun."""
        import aiohttp

        begun, upload = asyncio.Event(), Upload(receive)
        path = _path(scope)

        async def answer(message: Message) -> None:
            begun.set()
            await send(message)

        try:
            await until_hang_up(upload.after, self._exchange(scope, path, upload, answer))
        except ClientGoneError:
            return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if upload.broken:
                return
            if begun.is_set():
                raise  # the server ends the connection: an end as of a whole answer would hide it
            log.warning("the router did not answer: %s", error)
            refusal = Unavailable("the router is starting or has ended", code="router", retry_after=1.0)
            await error_response(refusal, path)(scope, receive, send)

    async def _exchange(self, scope: Scope, path: str, upload: Upload, send: Send) -> None:
        named = dict(scope["headers"])
        has_body = b"content-length" in named or b"transfer-encoding" in named
        asked = self._session.request(
            scope["method"],
            _target(self.router.url, path, scope["query_string"]),
            headers=[(_text(name), _text(value)) for name, value in _asked(scope)],
            data=upload.pieces() if has_body else None,
            allow_redirects=False,
        )
        if not has_body:
            upload.ended.set()
        async with asked as answer:
            own = [(name.lower(), value) for name, value in _passed(answer.raw_headers)]
            headers = [(name, value) for name, value in own if name not in OF_THE_SERVER]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Upload:
    """A request's body as it comes, and what `receive` says after it."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.ended = asyncio.Event()
        self.broken = False  # the client has left before its end

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises ConnectionError where the client leaves before its end."""
        while not self.ended.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.broken = True
                raise ConnectionError("the client left while it was sending")
            if not message.get("more_body", False):
                self.ended.set()
            yield message.get("body", b"")

    async def after(self) -> Message:
        await self.ended.wait()
        return await self._receive()


def _passed(headers: Any) -> list[tuple[bytes, bytes]]:
    """Without those of the connection, and those that `Connection` names."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    own = OF_A_CONNECTION | {word.strip().lower() for word in named.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in own]


def _asked(scope: Scope) -> list[tuple[bytes, bytes]]:
    """A request's headers: with the address of who asked, and one length where it came with two (RFC 9112, 6.3)."""
    passed = _passed(scope["headers"])
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        passed = [(name, value) for name, value in passed if name != b"content-length"]
    if not scope.get("client"):
        return passed
    before = [value for name, value in passed if name == FORWARDED]
    passed = [(name, value) for name, value in passed if name != FORWARDED]
    return [*passed, (FORWARDED, b", ".join([*before, scope["client"][0].encode()]))]


def _path(scope: Scope) -> str:
    """Without the prefix under which the application is found here."""
    path, prefix = scope["path"], scope.get("root_path", "").rstrip("/")
    own: str = path.removeprefix(prefix) if path == prefix or path.startswith(f"{prefix}/") else path
    return own


def _target(url: str, path: str, query: bytes) -> Any:
    """The address there. Its host and port are ours, whatever the path is: one that is none gets its answer there."""
    import yarl

    path = quote(path if path.startswith("/") else f"/{path}", safe="/:@!$&'()*+,;=~")
    return yarl.URL(f"{url}{path}" + (f"?{query.decode('latin-1')}" if query else ""), encoded=True)


def _text(header: bytes) -> str:
    """As the client library writes it back, byte for byte where it is UTF-8."""
    return header.decode("utf-8", "surrogateescape")
