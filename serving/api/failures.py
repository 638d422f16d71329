"""Every error as clients expect it: OpenAI's an HTTP status and a JSON object with message, type, param and code.

Exceptions that are not ours (Starlette's, and bugs) become answers here too; nothing is retried.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serving.api.body import ClientGoneError
from serving.api.messages_errors import ErrorAnswer, messages_error
from serving.errors import (
    Diverged,
    InternalError,
    InvalidRequest,
    MillraceError,
    NotFound,
    PayloadTooLarge,
    Quarantined,
    RequestTimeout,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

NO_USE_TO_REPEAT = ("slo", "rate_limit_exceeded")  # codes of refusals that, without a time, hold at any time
_LONGEST_RETRY_S = 86_400.0


def error_body(error: MillraceError) -> bytes:
    told = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": told})


def _openai_error(error: MillraceError, request: str) -> ErrorAnswer:
    return ErrorAnswer(error.status, error_body(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorForm:
    """How an API answers errors, given them and the id of the HTTP request, and the header that has the id."""

    write: Callable[[MillraceError, str], ErrorAnswer]
    id_header: str


OPENAI_FORM = ErrorForm(write=_openai_error, id_header="x-request-id")
ERROR_FORMS = {"/v1/messages": ErrorForm(write=messages_error, id_header="request-id")}
"""By path, for what lies there and below, where that is not OpenAI's."""


def error_form(path: str) -> ErrorForm:
    """The form of the API that a request's path belongs to."""
    return next((form for at, form in ERROR_FORMS.items() if path == at or path.startswith(at + "/")), OPENAI_FORM)


def error_response(error: MillraceError, path: str = "", request: str = "") -> Response:
    """The whole answer for an error of ours; `request` is the HTTP request's id."""
    status, body = error_form(path).write(error, request)
    headers: dict[str, str] = {}
    if error.retry_after is not None or (error.status in (429, 503) and error.code not in NO_USE_TO_REPEAT):
        headers["retry-after"] = str(_whole_seconds(error.retry_after or 1.0))
    if isinstance(error, (Quarantined, Diverged)):
        headers["x-should-retry"] = "false"  # OpenAI's clients send a 409 and a 500 again, unless they are told
    if error.status == 401:
        headers |= {"www-authenticate": "Bearer", "connection": "close"}  # a connection is kept for those with a key
    if isinstance(error, (PayloadTooLarge, RequestTimeout)):
        headers["connection"] = "close"  # the rest of the body is not wanted
    return Response(body, status, headers, media_type="application/json")


def _whole_seconds(seconds: float) -> int:
    """Rounded up, from 1 to a day: an error of another service may carry any number."""
    return math.ceil(min(_LONGEST_RETRY_S, max(1.0, seconds)))


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillraceError)
    if isinstance(error, InternalError):
        logger.error("request %s failed: %s", request.state.ids.shown, error.message, exc_info=error)
    return error_response(error, request.url.path, request.state.ids.shown)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method, wrong media type."""
    assert isinstance(error, HTTPException)
    path, ids = request.url.path, request.state.ids
    if error.status_code == 404:
        return error_response(NotFound(f"there is nothing at {path[:200]}", code="unknown_route"), path, ids.shown)
    message = f"{request.method} is not allowed here" if error.status_code == 405 else str(error.detail)
    told = error_response(InvalidRequest(message), path, ids.shown)
    return Response(told.body, error.status_code, error.headers, media_type="application/json")


async def _on_hang_up(request: Request, error: Exception) -> Response:
    """The client left while it was sending. 499 is what nginx logs for that; no one receives it."""
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Any other exception: the server logs its trace, the client gets a 500 without details."""
    path, shown = request.url.path, request.state.ids.shown
    response = error_response(InternalError("the server failed on this request"), path, shown)
    response.headers.update({"x-request-id": shown, error_form(path).id_header: shown})
    return response


def handle_failures(app: FastAPI) -> None:
    """Let every exception leave `app` as an answer of ours."""
    app.add_exception_handler(MillraceError, _on_our_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGoneError, _on_hang_up)
    app.add_exception_handler(Exception, _on_bug)
