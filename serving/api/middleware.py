"""ASGI middleware around every endpoint: ids of requests, the API key where one is required, what was answered.

It looks at headers only, and logs none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.callers import ANYBODY, ApiCaller, Callers
from serving.api.failures import error_form, error_response
from serving.api.plan import RequestIds
from serving.api.settings import HttpObserver
from serving.errors import Forbidden, MillraceError, Unauthorized
from serving.logs import mark_task

OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics", "/version"})
OF_ALL = frozenset({"/audit", "/load", "/v1/workers"})  # what they tell is of all tenants: for operators' keys

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AuthMiddleware:
    """Without a key it only gives ids: `request.state.ids`, and the header x-request-id.

    `request.state.caller` is who sends the request, and `request.state.key` the caller's name. What an endpoint writes
    into `request.state.answer_headers` before its answer begins goes out with it, be that an error or not.
    """

    def __init__(self, app: ASGIApp, *, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ids, path = request_ids(headers.get("x-request-id", "")), scope["path"]
        mark_task(ids.unique)  # the task is this request's alone
        answer_headers: dict[str, str] = {}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = {"x-request-id": ids.shown, error_form(path).id_header: ids.shown}
                MutableHeaders(scope=message).update({**answer_headers, **shown})
            await send(message)

        caller: ApiCaller | None = ANYBODY
        if self._callers.required and path not in OPEN_PATHS:
            caller = self._callers.of(headers)
        refusal = _refusal(caller, path)
        if refusal is not None:
            await error_response(refusal, path, ids.shown)(scope, receive, send_with_id)
            return
        assert caller is not None
        state = scope.setdefault("state", {})
        state |= {"ids": ids, "caller": caller, "key": caller.name, "answer_headers": answer_headers}
        await self._app(scope, receive, send_with_id)


def _refusal(caller: ApiCaller | None, path: str) -> MillraceError | None:
    if caller is None:
        told = "a valid API key is required: Authorization: Bearer <key>, or x-api-key: <key>"
        return Unauthorized(told, code="invalid_api_key")
    if path in OF_ALL and not caller.rights.operator:
        return Forbidden(f"{path} tells of all tenants: this API key is no operator's", code="no_operator")
    return None


class Teller(Protocol):
    """Is told of an answer by what was asked, its status (0: the client left before it began), and seconds."""

    def __call__(self, scope: Scope, status: int, seconds: float) -> None: ...


class AnsweredMiddleware:
    """Tells `tellers` of every answer but those of OPEN_PATHS, and of a bug as the 500 that it becomes outside.

    Seconds are from the request's headers to the end of the answer.
    """

    def __init__(self, app: ASGIApp, *, tellers: Sequence[Teller], clock: Callable[[], float]) -> None:
        self._app = app
        self._tellers = tellers
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        began, status = self._clock(), 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            status = status or 500
            raise
        finally:
            for tell in self._tellers:
                tell(scope, status, self._clock() - began)


def route_of(scope: Scope) -> str:
    """The pattern of the endpoint that answered, none of the client's words; `none` where there was none."""
    route: str = getattr(scope.get("route"), "path", "none")
    return route


def observed_by(observer: HttpObserver) -> Teller:
    """Tells the observer of answers that began."""

    def tell(scope: Scope, status: int, seconds: float) -> None:
        if status:
            observer.answered(method=scope["method"], handler=route_of(scope), status=status, seconds=seconds)

    return tell


def request_ids(wanted: str) -> RequestIds:
    """The client's own request id if it is a short plain word, with something of ours to make it unique."""
    ours = uuid4().hex
    if not _SANE_ID.fullmatch(wanted):
        return RequestIds(shown=ours, unique=ours)
    return RequestIds(shown=wanted, unique=f"{wanted}-{ours[:12]}")
