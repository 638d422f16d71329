"""Reads a request's body within bounds of size and time, and turns it into a validated model.

A client that sends too much or too slowly is refused while it is still sending; nothing here knows of endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive

from serving.api.fields import IgnoredFields, shown_path, sort_fields
from serving.api.strict import Strict
from serving.config import HttpConfig
from serving.errors import InvalidRequest, MillraceError, PayloadTooLarge, RequestTimeout

Body = TypeVar("Body", bound=Strict)


class ClientGoneError(Exception):
    """The client closed the connection; no answer is sent."""


def check_headers(headers: Headers) -> None:
    """Refuse a body that is not plain JSON; a request without a content type is taken for JSON."""
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the content type must be application/json, not {kind!r}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"the content encoding {encoding!r} is not supported")


async def read_body(receive: Receive, headers: Headers, config: HttpConfig) -> bytes:
    """The whole body, of at most `max_body_size` bytes, received within `body_timeout` seconds.

    Raises HTTPException as `check_headers`, `PayloadTooLarge` on the first byte too many, or at once when the
    announced length is, `RequestTimeout`, and `ClientGoneError`.
    """
    check_headers(headers)
    limit, timeout = config.max_body_size, config.body_timeout
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    received: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                received.append(message.get("body", b""))
                size += len(received[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(received)
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not arrive within {timeout:g} s", code="body_timeout") from error


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes", code="body_too_large")


def parse_body(kind: type[Body], body: bytes, *, strict: bool = False) -> tuple[Body, IgnoredFields]:
    """`body` as a `kind`, and what of it was ignored; `strict` as in `sort_fields`.

    Raises `InvalidRequest` that names the field at fault.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    kept, ignored = sort_fields(kind, fields, strict=strict)
    with telling(ignored):
        return checked(kind, kept), ignored


@contextmanager
def telling(ignored: IgnoredFields) -> Iterator[None]:
    """An error raised inside says what of its body was ignored."""
    try:
        yield
    except MillraceError as error:
        error.ignored = ignored
        raise


def checked(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """`fields` as a `kind`. Raises `InvalidRequest` that names the field at fault."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, fields) from error


def _invalid(error: ValidationError, fields: Mapping[str, Any]) -> InvalidRequest:
    """The error that points deepest into the body: where a field has several forms, the one that nearly fits.

    Lists are judged up to their first wrong item, so there are never many.
    """
    told = error.errors(include_url=False, include_context=False, include_input=False)
    found = [(_path(details["loc"], fields), details["type"], details["msg"]) for details in told]
    path, kind, message = max(found, key=lambda entry: len(entry[0]))
    param = shown_path(path)
    if kind == "extra_forbidden":
        message = "is not a supported field"
    return InvalidRequest(f"{param}: {message.removeprefix('Value error, ')}", param=param)


def _path(location: tuple[int | str, ...], fields: Mapping[str, Any]) -> list[int | str]:
    """Pydantic's location without the names of the union members it tried: only steps that exist in the body.

    The last step of a missing field does not exist either, and is kept when nothing else is left to follow.
    """
    path: list[int | str] = []
    here: Any = fields
    for position, step in enumerate(location):
        exists = step in here if isinstance(here, dict) else isinstance(here, list) and step in range(len(here))
        if exists:
            here = here[step]
        elif not (isinstance(here, dict) and position == len(location) - 1):
            continue
        path.append(step)
    return path
