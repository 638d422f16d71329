"""What a request's headers say of asking again: the same answer for one `Idempotency-Key`, from `Last-Event-ID` on.

Nothing is kept between two such requests: seed and response id follow from the key, and the id of an event says how far
its client has read. Any router with the same model can therefore go on with a stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from serving.errors import InvalidRequest

KEY, LAST_EVENT = "idempotency-key", "last-event-id"
HEADERS = {
    KEY: "The same key and body have the same answer: a seed where the body has none, and the ids of events",
    LAST_EVENT: "The id of the last event that came of a stream that broke off: the answer is what follows it",
}
"""The headers that are read, and what each of them means."""

MOST_KEY = 255  # characters, as elsewhere
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MOST_KEY}}}")
_MARK = re.compile(r"(\d{1,12})-([1-9]\d{0,8})-([0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventMark:
    """How far a stream has come: the id of an event."""

    created: int  # Unix seconds, of the response
    events: int  # up to and with this one
    digest: str  # of the request and the tokens up to there

    def __str__(self) -> str:
        return f"{self.created}-{self.events}-{self.digest}"


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request that may be asked again. `name` is its key's, apart from those of other owners."""

    name: str
    after: EventMark | None  # what its client has of the answer; None: nothing

    @property
    def seed(self) -> int:
        """Unsigned 64 bits."""
        return int.from_bytes(blake2b(self.name.encode(), digest_size=8, person=b"seed").digest(), "little")


def repeatable(headers: Mapping[str, str], owner: str) -> Repeatable | None:
    """What the headers of one of the owner's requests ask for; None without a key. Raises InvalidRequest."""
    key, last = headers.get(KEY), headers.get(LAST_EVENT)
    if key is None:
        if last is not None:
            told = f"{LAST_EVENT}: send the {KEY} of the stream too; one without has no event ids"
            raise InvalidRequest(told, param=LAST_EVENT)
        return None
    if not _KEY.fullmatch(key):
        told = f"{KEY}: must be 1 to {MOST_KEY} visible ASCII characters, such as a UUID"
        raise InvalidRequest(told, param=KEY)
    return Repeatable(f"{owner}\0{key}", None if last is None else _mark(last))


def repeated_name(key: str, owner: str) -> str:
    """What the ids of all responses to a key of this owner are made of."""
    return blake2b(f"{owner}\0{key}".encode(), digest_size=16, person=b"response").hexdigest()


def _mark(last: str) -> EventMark:
    found = _MARK.fullmatch(last)
    if found is None:
        told = f"{LAST_EVENT}: {last[:80]!r} is no event id of a stream: repeat the last `id:` as it came"
        raise InvalidRequest(told, param=LAST_EVENT)
    return EventMark(int(found[1]), int(found[2]), found[3])
