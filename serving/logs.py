"""Logging to standard error: set up once in each process, with the marks of its request on every line that has one.

Secrets are never logged. Whatever Python itself would write there (warnings, exceptions nobody caught) is logged too.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, replace
from types import TracebackType
from typing import Protocol

from serving.log_config import JSON
from serving.log_lines import NO_REQUEST, LineFormatter, LogSetup, RequestMarks, formatter_of, one_line
from serving.messages import shown_tenant
from serving.redaction import Redactor
from serving.shared_stderr import WholeLines
from serving.tracing import TraceContext

ACCESS = "millrace.access"
HANDED_DOWN = "MILLRACE_LOG_SETUP"  # by which helper processes log as the process that starts them does
_CHATTY = ("asyncio", "httpx", "torch", "urllib3", "uvicorn.error")
log = logging.getLogger(__name__)

_marks: ContextVar[RequestMarks] = ContextVar("request_marks", default=NO_REQUEST)
_formatter: list[LineFormatter] = [formatter_of(LogSetup(), _marks.get, Redactor())]


class LoggedRequest(Protocol):
    """What is told of a request (serving.messages.Request)."""

    @property
    def request_id(self) -> str: ...
    @property
    def trace(self) -> TraceContext | None: ...
    @property
    def service_class(self) -> str: ...
    @property
    def owner(self) -> str: ...


def marks_of(request: LoggedRequest) -> RequestMarks:
    trace_id, span_id = ids_of(request.trace)
    return RequestMarks(
        request_id=request.request_id,
        trace_id=trace_id,
        span_id=span_id,
        service_class=request.service_class,
        tenant=shown_tenant(request.owner),
    )


def ids_of(trace: TraceContext | None) -> tuple[str, str]:
    """Trace and span of a `traceparent`; empty ones without."""
    parts = trace.traceparent.split("-") if trace is not None else []
    return (parts[1], parts[2]) if len(parts) == 4 else ("", "")


@contextmanager
def request_context(request: LoggedRequest) -> Iterator[None]:
    """Lines logged inside carry the marks of this request, in this task and those it starts."""
    token = _marks.set(marks_of(request))
    try:
        yield
    finally:
        with suppress(ValueError):  # a stream that was left is ended by another task, whose lines are not the request's
            _marks.reset(token)


def mark_task(request_id: str) -> None:
    """Lines that this task logs from now on are of this request: also those of a server above that sees it fail."""
    _marks.set(RequestMarks(request_id=request_id))


# ---- setting up -------------------------------------------------------------------------------------------------


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error. A line that cannot be made is told of in one that can.

    logging's own handler would write the traces of both, with what was to be logged.
    """

    def __init__(self, formatter: LineFormatter):
        super().__init__(WholeLines(sys.stderr))
        self.setFormatter(formatter)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if error is None or isinstance(error, OSError):  # standard error itself is gone: there is nobody to tell
            return
        where = f"{type(error).__name__} at {record.pathname}:{record.lineno}"
        told = f"a line of {record.name} could not be logged: {where}"
        with suppress(OSError, ValueError):
            self.stream.write(bare_line(told).decode())
            self.flush()


def setup_logging(setup: LogSetup, secrets: Iterable[str] = ()) -> None:
    """Log to standard error as `setup` says, without what is known to be secret."""
    _formatter[0] = formatter_of(setup, _marks.get, Redactor(secrets))
    root = logging.getLogger()
    root.handlers[:] = [LineHandler(_formatter[0])]
    root.setLevel(setup.level.upper())
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger(ACCESS).setLevel(logging.INFO if setup.access else logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def current_setup() -> LogSetup:
    """How this process logs, at the level it has now."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
    return replace(_formatter[0].setup, level=level)


def set_worker(role: str, generation: str) -> None:
    """What JSON lines of this process's worker say from now on."""
    _formatter[0].setup = replace(_formatter[0].setup, role=role, generation=generation)


def handed_down(part: str) -> dict[str, str]:
    """For the environment of a helper process, which is this `part` of our own."""
    setup = current_setup()
    return {HANDED_DOWN: json.dumps(asdict(replace(setup, name=f"{setup.name}/{part}")))}


def setup_helper(environ: Mapping[str, str]) -> None:
    """Log as the process does that has started this one."""
    given = environ.get(HANDED_DOWN)
    setup_logging(LogSetup(**json.loads(given)) if given else LogSetup())


def set_part(part: str) -> None:
    """What lines of this helper process call it from now on, beside the name of the one that has started it."""
    setup = _formatter[0].setup
    _formatter[0].setup = replace(setup, name=f"{setup.name.rpartition('/')[0] or setup.name}/{part}")


def bare_line(text: str) -> bytes:
    """A line for standard error where logging cannot be used: its locks may be held, or it has not begun."""
    formatter = _formatter[0]
    if formatter.setup.form != JSON:
        return f"millrace: {one_line(formatter.redactor.redacted(text))}\n".encode("utf-8", "backslashreplace")
    record = logging.LogRecord("millrace", logging.CRITICAL, __file__, 0, text, (), None)
    return f"{formatter.format(record)}\n".encode()


# ---- what nobody caught -----------------------------------------------------------------------------------------


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("an exception ended the process", exc_info=(kind, error, trace))


def _uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not isinstance(told.exc_value, SystemExit):
        name = told.thread.name if told.thread is not None else "one that is gone"
        log.critical("an exception ended thread %s", name, exc_info=(told.exc_type, told.exc_value, told.exc_traceback))


def _unraisable(told: sys.UnraisableHookArgs) -> None:
    error = told.exc_value
    log.error(
        "%s %s",
        told.err_msg or "an exception was ignored in",
        type(told.object).__name__,
        exc_info=None if error is None else (type(error), error, told.exc_traceback),
    )
