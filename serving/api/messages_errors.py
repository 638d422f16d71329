"""Errors as Anthropic's clients expect them: their types and statuses, and the id of the request in the body.

Queues that are full are 529, as theirs are; 429 is left to the limits of an API key.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from serving.errors import MillraceError, Overloaded

OVERLOADED = 529
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ErrorAnswer(NamedTuple):
    """What an error is answered with."""

    status: int
    body: bytes


def messages_error(error: MillraceError, request: str) -> ErrorAnswer:
    """`request` is the HTTP request's id."""
    status = OVERLOADED if isinstance(error, Overloaded) else error.status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request}
    return ErrorAnswer(status, orjson.dumps(told))
