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
    """Without a key it only gives ids: `request.state.ids`, and the header x-request-id."""

    def __init__(self, app: ASGIApp, *, api_key: str | None = None) -> None:
        self._app = app
        # Digests have one length, so a comparison says nothing about the length of the key either.
        self._key = sha256(api_key.encode()).digest() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ids = request_ids(headers.get("x-request-id", ""))
        scope.setdefault("state", {})["ids"] = ids

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = ids.shown
            await send(message)

        if scope["path"] not in OPEN_PATHS and not self._is_authorized(headers.get("authorization", "")):
            refusal = Unauthorized("a valid API key is required: Authorization: Bearer <key>", code="invalid_api_key")
            await error_response(refusal)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _is_authorized(self, authorization: str) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._key) and scheme.lower() == "bearer"


def request_ids(wanted: str) -> RequestIds:
    """The client's own request id if it is a short plain word, with something of ours to make it unique."""
    ours = uuid4().hex
    if not _SANE_ID.fullmatch(wanted):
        return RequestIds(shown=ours, unique=ours)
    return RequestIds(shown=wanted, unique=f"{wanted}-{ours[:12]}")
