"""ASGI middleware around every endpoint: gives each request its ids, and checks the API key where one is required.

It looks at headers only; keys are compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.failures import error_response
from serving.api.plan import RequestIds
from serving.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics", "/version"})

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AuthMiddleware:
    """Without a key it only gives ids: `request.state.ids`, and the header x-request-id. A key may be several, with
    commas between them.

    `request.state.key` tells API keys apart without showing them. What an endpoint writes into
    `request.state.answer_headers` before its answer begins goes out with it, be that an error or not.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None = None) -> None:
        self._app = app
        # Digests have one length, so a comparison says nothing about the length of a key either.
        self._keys = [sha256(key.encode()).digest() for key in (api_key or "").split(",") if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ids = request_ids(headers.get("x-request-id", ""))
        answer_headers: dict[str, str] = {}
        state = scope.setdefault("state", {})
        state |= {"ids": ids, "key": "", "answer_headers": answer_headers}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({**answer_headers, "x-request-id": ids.shown})
            await send(message)

        if self._keys and scope["path"] not in OPEN_PATHS:
            state["key"] = self._key(headers.get("authorization", ""))
        if state["key"] is None:
            refusal = Unauthorized("a valid API key is required: Authorization: Bearer <key>", code="invalid_api_key")
            await error_response(refusal)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _key(self, authorization: str) -> str | None:
        """The digest of the valid key it shows, cut short; None without one."""
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them: no early end
        return digest.hex()[:16] if scheme.lower() == "bearer" and any(matches) else None


def request_ids(wanted: str) -> RequestIds:
    """The client's own request id if it is a short plain word, with something of ours to make it unique."""
    ours = uuid4().hex
    if not _SANE_ID.fullmatch(wanted):
        return RequestIds(shown=ours, unique=ours)
    return RequestIds(shown=wanted, unique=f"{wanted}-{ours[:12]}")
