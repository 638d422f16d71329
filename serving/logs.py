"""Logging to stderr, with the request id on every line that belongs to a request. Secrets are never logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_service = ["millrace"]
_request_id: ContextVar[str] = ContextVar("request_id", default="-")


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Lines logged inside carry this request id, in this task and those it starts."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        with suppress(ValueError):  # a stream that was left is ended by another task, whose lines are not the request's
            _request_id.reset(token)


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


def service() -> str:
    """What this process calls itself in its lines."""
    return _service[0]


def setup_logging(service: str, level: str = "info") -> None:
    """Log to stderr: time, level, service, request id, message."""
    _service[0] = service
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_AddRequestId())
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} [%(request_id)s] %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpx", "torch", "urllib3", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
