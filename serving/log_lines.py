"""The forms of a log line: text for people, one JSON object a line for collectors. A value never makes a second line.

A formatter is told what the process is called, and asks what request the code that logs serves; it knows no handler.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from serving.log_config import JSON, LogConfig
from serving.redaction import Redactor

MOST_CHARACTERS = 32 << 10  # of a message, and of an exception; the middle of a longer one is left out
FIELDS = "fields"  # of a record: more values for the object, made by ours, such as those of an access line
# Control characters but the tab, line and paragraph separators, and what turns the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_WRITTEN = {code: ascii(chr(code))[1:-1] for code in range(0x206A) if _CONTROL.match(chr(code))}

Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMarks:
    """What log lines say of the request they belong to; empty where there is none, or it is not known."""

    request_id: str = ""
    trace_id: str = ""
    span_id: str = ""
    service_class: str = ""
    tenant: str = ""  # a digest

    def values(self) -> dict[str, Value]:
        """Those that are known."""
        found = {"request_id": self.request_id, "trace_id": self.trace_id, "span_id": self.span_id}
        found |= {"class": self.service_class, "tenant": self.tenant}
        return {name: word for name, word in found.items() if word}


NO_REQUEST = RequestMarks()


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSetup:
    """What a process calls itself in its lines, and how it writes them."""

    name: str = "millrace"
    role: str = "millrace"
    level: str = "info"
    form: str = "text"
    access: bool = False  # a line for each answer of the HTTP API
    generation: str = ""  # of a worker, once its model is loaded


def setup_of(config: LogConfig, role: str, name: str) -> LogSetup:
    """Of a process that is configured so."""
    return LogSetup(name=name, role=role, level=config.log_level, form=config.log_format, access=config.access_log)


class LineFormatter(logging.Formatter):
    """What both forms have in common."""

    def __init__(self, setup: LogSetup, marks: Callable[[], RequestMarks], redactor: Redactor):
        super().__init__()
        self.setup = setup
        self.marks = marks
        self.redactor = redactor

    def message(self, record: logging.LogRecord) -> str:
        return shortened(self.redactor.redacted(record.getMessage()))

    def exception(self, record: logging.LogRecord) -> str:
        """The trace, and the stack where one is asked for; empty without."""
        texts = [self.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
        texts += [record.stack_info] if record.stack_info else []
        return shortened(self.redactor.redacted("\n".join(texts)))


class JsonFormatter(LineFormatter):
    """One object, in ASCII; half a surrogate pair, for which collectors drop a line, is written out as Python does."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Value] = {
            "timestamp": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message(record),
            "role": self.setup.role,
            "name": self.setup.name,
            "pid": record.process,
        }
        line |= {"generation": self.setup.generation} if self.setup.generation else {}
        line |= self.marks().values()
        more: Mapping[str, Value] = getattr(record, FIELDS, {})
        line |= {
            name: self.redactor.redacted(value) if isinstance(value, str) else value for name, value in more.items()
        }
        if exception := self.exception(record):
            line["exception"] = exception
        told = json.dumps(line)
        if "\\ud" in told:  # perhaps half of a pair
            told = json.dumps(
                {name: _whole(value) if isinstance(value, str) else value for name, value in line.items()}
            )
        return told


class TextFormatter(LineFormatter):
    """Time, level, process, request id, message. Lines of an exception begin with `  | `, which no other line does."""

    def format(self, record: logging.LogRecord) -> str:
        at = f"{self.formatTime(record, '%H:%M:%S')}.{record.msecs:03.0f}"
        request = self.marks().request_id or "-"
        line = one_line(f"{at} {record.levelname:<7} {self.setup.name} [{request}] {self.message(record)}")
        lines = [f"  | {one_line(part)}" for part in self.exception(record).split("\n") if part]
        return "\n".join((line, *lines))


def formatter_of(setup: LogSetup, marks: Callable[[], RequestMarks], redactor: Redactor) -> LineFormatter:
    """As the setup's form asks for."""
    kind = JsonFormatter if setup.form == JSON else TextFormatter
    return kind(setup, marks, redactor)


def one_line(text: str) -> str:
    """The text with its control characters written out, as Python writes them."""
    return text.translate(_WRITTEN) if _CONTROL.search(text) else text


def _whole(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


def rfc3339(seconds: float) -> str:
    """Unix seconds as UTC, to the microsecond: 2026-11-23T13:15:00.123456Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
