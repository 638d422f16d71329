"""How much a process logs, and in which form. It imports no logging library: placement files are read without one."""

from __future__ import annotations

from dataclasses import dataclass

from serving.options import option

TEXT, JSON = "text", "json"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The log, on standard error."""

    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        TEXT, "form of the log's lines; json: an object each (docs/operate.md has its fields)", choices=(TEXT, JSON)
    )
    access_log: bool = option(
        False, "log a line for each answer of the HTTP API: method, route, status, milliseconds, key id"
    )
