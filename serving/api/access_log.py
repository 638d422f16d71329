"""A log line for each answer of the HTTP API, where --access-log asks for them.

It has the route and never the address that was asked for, whose path and query are the client's words.
"""

from __future__ import annotations

import logging

from starlette.types import Scope

from serving.api.callers import ANYBODY, ApiCaller
from serving.api.middleware import route_of
from serving.log_lines import FIELDS
from serving.logs import ACCESS
from serving.messages import shown_tenant

log = logging.getLogger(ACCESS)

CLIENT_LEFT = 499  # before an answer began; what nginx logs for that


def log_answer(scope: Scope, status: int, seconds: float) -> None:
    """The line of one answer (serving.api.middleware.Teller). AuthMiddleware has said who asks."""
    if not log.isEnabledFor(logging.INFO):
        return
    route, status, milliseconds = route_of(scope), status or CLIENT_LEFT, seconds * 1e3
    caller: ApiCaller = scope.get("state", {}).get("caller") or ANYBODY
    told = {"method": scope["method"], "route": route, "status": status, "milliseconds": round(milliseconds, 3)}
    told |= {"client": scope["client"][0]} if scope.get("client") else {}
    told |= {"key_id": caller.key_id} if caller.key_id else {}
    told |= {"tenant": shown_tenant(caller.rights.owner)} if caller.rights.owner else {}
    log.info("%s %s: %d in %.1f ms", scope["method"], route, status, milliseconds, extra={FIELDS: told})
