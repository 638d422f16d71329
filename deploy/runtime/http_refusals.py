"""The answers of the HTTP server to what never reaches the app, as whole responses after which it closes."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import orjson

from deploy.runtime.connection_table import ConnectionEnd


@dataclass(frozen=True, slots=True)
class Refusal:
    """One such answer, in the form in which OpenAI's clients read errors."""

    status: HTTPStatus
    kind: str
    message: str

    def response(self, code: str) -> bytes:
        told = {"message": self.message, "type": self.kind, "param": None, "code": code}
        body = orjson.dumps({"error": told})
        head = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", "content-type: application/json"]
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            head.append("retry-after: 1")
        head += [f"content-length: {len(body)}", "connection: close", "", ""]
        return "\r\n".join(head).encode() + body


_REFUSALS = {
    ConnectionEnd.CONNECTIONS: Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error", "the server has as many connections as it may"
    ),
    ConnectionEnd.ADDRESS: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS, "overloaded_error", "your address has as many connections as it may"
    ),
    ConnectionEnd.HEADER_TIMEOUT: Refusal(
        HTTPStatus.REQUEST_TIMEOUT, "timeout_error", "the headers of the request did not arrive in time"
    ),
    ConnectionEnd.HEADER_SIZE: Refusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error", "the headers of the request are too large"
    ),
    ConnectionEnd.HEADER_COUNT: Refusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error", "the request has too many headers"
    ),
    ConnectionEnd.PIPELINED: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS, "overloaded_error", "too much was sent ahead of the answers on this connection"
    ),
    ConnectionEnd.BODY_PIECES: Refusal(
        HTTPStatus.BAD_REQUEST, "invalid_request_error", "the body comes in too many small pieces"
    ),
    ConnectionEnd.MALFORMED: Refusal(
        HTTPStatus.BAD_REQUEST, "invalid_request_error", "this is not a valid HTTP/1.1 request"
    ),
}
RESPONSES = {end: refusal.response(end.value) for end, refusal in _REFUSALS.items()}
