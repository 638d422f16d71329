"""What a request is promised: its objectives, class, priority, session and deadline, from body, headers and class.

The body goes before a header, and that before the class. It reads no clock: when the request came is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from serving.api import resumption
from serving.api.plan import RequestHead, Rights
from serving.api.schema import DAY_MS, MOST_PRIORITY, PlacedBody
from serving.errors import Forbidden, InvalidRequest
from serving.messages import Slo
from serving.service_class import ServiceClass

DAY = 86_400.0
MOST_SESSION = 128  # characters; a longer name is replaced by its digest

TTFT, TPOT, PRIORITY = "x-ttft-slo-ms", "x-tpot-slo-ms", "x-priority"
CLASS, SESSION, TIMEOUT = "x-service-class", "x-session-id", "x-request-timeout"
HEADERS = {
    TTFT: "as `ttft_slo_ms`",
    TPOT: "as `tpot_slo_ms`",
    PRIORITY: "as `priority`",
    CLASS: "as `service_class`",
    SESSION: "Requests that name the same session are placed together by --routing-policy session_sticky",
    TIMEOUT: "Seconds, at most a day, after which the request ends with a 504 if it has not ended yet",
}
"""The headers that are read of any request, and what each of them means."""

READ = {**HEADERS, **resumption.HEADERS}
"""The same of requests for texts."""


def with_read_headers(head: RequestHead) -> RequestHead:
    """The same with no headers but those that are read."""
    return replace(head, headers={name: head.headers[name] for name in READ if name in head.headers})


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """As serving.messages.Request has it; `deadline` is on the router's clock."""

    slo: Slo
    service_class: str
    priority: int
    session: str
    deadline: float | None


class PromiseReader:
    """Reads promises, given the classes there are and the name of the one that requests without one are of."""

    def __init__(self, classes: Mapping[str, ServiceClass], default: str):
        self._classes = classes
        self._default = classes[default]

    def promise(self, fields: PlacedBody, head: RequestHead) -> Promise:
        """Raises InvalidRequest that names the field or header, Forbidden for what the API key may not ask for."""
        headers = head.headers
        known = self._class(fields.service_class, headers, head.rights)
        ttft_ms = _first(fields.ttft_slo_ms, _number(headers, TTFT, DAY_MS), known.ttft_slo_ms)
        tpot_ms = _first(fields.tpot_slo_ms, _number(headers, TPOT, DAY_MS), known.tpot_slo_ms)
        own = fields.priority if fields.priority is not None else _priority(headers)
        seconds = _number(headers, TIMEOUT, DAY)
        most_urgent = head.rights.priority
        if most_urgent is not None and known.priority + own < most_urgent:
            told = f"priority {known.priority + own} goes before {most_urgent}, the most urgent of this API key"
            raise Forbidden(told, param="priority", code="priority_not_allowed")
        return Promise(
            slo=Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
            service_class=known.name,
            priority=known.priority + own,
            session=_session(headers.get(SESSION) or fields.prompt_cache_key or fields.user or "", head.rights),
            deadline=None if seconds is None else head.arrived + seconds,
        )

    def _class(self, wanted: str | None, headers: Mapping[str, str], rights: Rights) -> ServiceClass:
        """Of requests that name none, where a key may not have the default: the first it may have."""
        name, param = (wanted, "service_class") if wanted is not None else (headers.get(CLASS), CLASS)
        if name is None:
            name = self._default.name
            if rights.classes and name not in rights.classes:
                name = rights.classes[0]
        known = self._classes.get(name.strip())
        if known is None:
            there = ", ".join(self._classes)
            raise InvalidRequest(f"{param}: {name[:80]!r} is none of the service classes: {there}", param=param)
        if rights.classes and known.name not in rights.classes:
            told = f"{param}: this API key may have {', '.join(rights.classes)}, not {known.name}"
            raise Forbidden(told, param=param, code="class_not_allowed")
        return known


def _first(*wanted: float | None) -> float | None:
    return next((value for value in wanted if value is not None), None)


def _number(headers: Mapping[str, str], name: str, most: float) -> float | None:
    """More than 0 and at most `most`; None where the header is not there."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= most:
        raise InvalidRequest(f"{name}: {text[:80]!r} is no number above 0 and at most {most:g}", param=name)
    return number


def _priority(headers: Mapping[str, str]) -> int:
    text = headers.get(PRIORITY, "0").strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 9 and abs(int(text)) <= MOST_PRIORITY):
        bounds = f"from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        raise InvalidRequest(f"{PRIORITY}: {text[:80]!r} is no whole number {bounds}", param=PRIORITY)
    return int(text)


def _session(name: str, rights: Rights) -> str:
    """What is learned of one tenant's conversation is of no use to another's of that name."""
    name = rights.within(name) if name else ""
    return name if len(name) <= MOST_SESSION else blake2b(name.encode(), digest_size=16).hexdigest()
