"""A log line for each answer of the HTTP API, where --access-log asks for them.

It has the route and never the address that was asked for, whose path and query are the client's words.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.callers import ANYBODY, ApiCaller
from serving.api.middleware import OPEN_PATHS
from serving.log_lines import FIELDS
from serving.logs import ACCESS
from serving.messages import shown_tenant

log = logging.getLogger(ACCESS)

CLIENT_LEFT = 499  # before an answer began; what nginx logs for that


class AccessLogMiddleware:
    """Stands outside of AuthMiddleware, which says who asks. Probes and scrapes (OPEN_PATHS) have no line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            status = status or 500  # what it becomes outside
            raise
        finally:
            _tell(scope, status or CLIENT_LEFT, (time.monotonic() - began) * 1e3)


def _tell(scope: Scope, status: int, milliseconds: float) -> None:
    route = getattr(scope.get("route"), "path", "none")
    caller: ApiCaller = scope.get("state", {}).get("caller") or ANYBODY
    told = {"method": scope["method"], "route": route, "status": status, "milliseconds": round(milliseconds, 3)}
    told |= {"client": scope["client"][0]} if scope.get("client") else {}
    told |= {"key_id": caller.key_id} if caller.key_id else {}
    told |= {"tenant": shown_tenant(caller.rights.owner)} if caller.rights.owner else {}
    log.info("%s %s: %d in %.1f ms", scope["method"], route, status, milliseconds, extra={FIELDS: told})
