"""API keys as they are stored: for each a keyed hash, a tenant, limits and rights, read from JSON lines. Pure.

A key is `mr-<id>-<secret>`; of the secret only HMAC-SHA-256 under a pepper is stored, and the pepper lies elsewhere.
Nothing here reads files or a clock.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson

from serving.api.plan import Rights
from serving.api.rate_limit import KeyLimits
from serving.options import ConfigError

MOST_KEYS = 10_000
LONGEST_LINE = 4096  # bytes
LEAST_PEPPER = 16  # bytes
MOST_NUMBER = 10**12
PREFIX = "mr"
HASH = "hmac-sha256:"
_ID = re.compile(r"[a-z0-9]{4,32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a tenant, a group or a class
_DIGEST = re.compile(HASH + r"([0-9a-f]{64})")
_LIMITS = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "concurrent_requests": "concurrent",
}
_FIELDS = ("id", "tenant", "hash", *_LIMITS, "classes", "priority", "expires", "share_prefixes", "operator")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """One stored key."""

    id: str
    tenant: str
    digest: bytes = field(repr=False)
    limits: KeyLimits = field(default_factory=KeyLimits)
    classes: tuple[str, ...] = ()  # of requests; none: all
    priority: int | None = None  # the most urgent a request may be: smaller goes first; None: any
    expires: float | None = None  # Unix seconds
    share_prefixes: str = ""  # a group: tenants that name the same one share cached prefixes; empty: nobody
    operator: bool = False  # may read what concerns all tenants


def key_digest(pepper: bytes, key_id: str, secret: str) -> bytes:
    """What is stored of a key's secret."""
    return hmac.digest(pepper, f"millrace-key-1\0{key_id}\0{secret}".encode("utf-8", "surrogatepass"), sha256)


def prefix_owner(pepper: bytes, entry: KeyEntry) -> str:
    """What salts the block keys of a tenant's requests, or of its group's.

    Without the pepper nobody can name it: no cache_salt of a client without a keys file leads to these blocks.
    """
    kind, name = ("group", entry.share_prefixes) if entry.share_prefixes else ("tenant", entry.tenant)
    return hmac.digest(pepper, f"millrace-prefixes-1\0{kind}\0{name}".encode(), sha256).hex()[:32]


def parse_keys(data: bytes, where: str) -> dict[str, KeyEntry]:
    """The entries by id; `where` is what errors call the file. Raises ConfigError that names the line."""
    found: dict[str, KeyEntry] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = _parse(line)
            if entry.id in found:
                raise ValueError(f"the id {entry.id} is there twice")
        except ValueError as error:
            raise ConfigError(f"{where}: line {number}: {error}", param="api_keys_file") from None
        found[entry.id] = entry
        if len(found) > MOST_KEYS:
            raise ConfigError(f"{where}: more than {MOST_KEYS} keys", param="api_keys_file")
    return found


def _parse(line: bytes) -> KeyEntry:
    """Raises ValueError, which never shows what the line holds but the names of its fields."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"longer than {LONGEST_LINE} bytes")
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ValueError(f"unknown: {unknown[0][:80]!r}; a key has {', '.join(_FIELDS)}")
    digest = _DIGEST.fullmatch(_text(fields, "hash"))
    if digest is None:
        raise ValueError(f"hash: must be {HASH} and 64 hexadecimal digits")
    return KeyEntry(
        id=_named(fields, "id", _ID),
        tenant=_named(fields, "tenant", _NAME),
        digest=bytes.fromhex(digest[1]),
        limits=KeyLimits(**{name: _number(fields, given, 1, MOST_NUMBER) for given, name in _LIMITS.items()}),
        classes=tuple(_classes(fields)),
        priority=_number(fields, "priority", -1_000_000, 1_000_000),
        expires=_number(fields, "expires", 0, MOST_NUMBER),
        share_prefixes=_named(fields, "share_prefixes", _NAME) if fields.get("share_prefixes") else "",
        operator=_switch(fields, "operator"),
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a text")
    return value


def _named(fields: Mapping[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = _text(fields, name)
    if not form.fullmatch(value):
        raise ValueError(f"{name}: must be of the form {form.pattern}")
    return value


def _number(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: must be a whole number from {least} to {most}")
    return value


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false")
    return value


def _classes(fields: Mapping[str, Any]) -> Iterator[str]:
    value = fields.get("classes") or []
    if not isinstance(value, list):
        raise ValueError("classes: must be a list of names")
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("classes: must be a list of names")
        yield name


def write_keys(entries: Mapping[str, KeyEntry]) -> bytes:
    """What `parse_keys` reads as these, a line for each."""
    return b"".join(orjson.dumps(_fields(entry)) + b"\n" for entry in entries.values())


def _fields(entry: KeyEntry) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": entry.id, "tenant": entry.tenant, "hash": HASH + entry.digest.hex()}
    shown |= {given: getattr(entry.limits, name) for given, name in _LIMITS.items()}
    shown |= {"classes": list(entry.classes), "priority": entry.priority, "expires": entry.expires}
    shown |= {"share_prefixes": entry.share_prefixes, "operator": entry.operator}
    said = {name: value for name, value in shown.items() if value is not None and value is not False}
    return {name: value for name, value in said.items() if value not in ("", [])}  # a priority of 0 is one


class Keyring:
    """The keys that are valid; `replace` them while requests are served. One event loop's.

    Raises ConfigError for a pepper that is too short.
    """

    def __init__(self, pepper: bytes, entries: Mapping[str, KeyEntry]):
        if len(pepper) < LEAST_PEPPER:
            raise ConfigError(f"the pepper of API keys has fewer than {LEAST_PEPPER} bytes", param="key_pepper_file")
        self._pepper = pepper
        self._nobody = key_digest(pepper, "", "")  # compared with where there is no such id: that takes as long
        self._entries: Mapping[str, KeyEntry] = {}
        self._rights: dict[str, Rights] = {}
        self.replace(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def replace(self, entries: Mapping[str, KeyEntry]) -> None:
        """From now on these are the keys."""
        self._entries = dict(entries)
        self._rights = {name: self._rights_of(entry) for name, entry in entries.items()}

    def find(self, shown: str, now: float) -> KeyEntry | None:
        """The entry of a key as a client shows it, at a time in Unix seconds; None if it is not valid."""
        prefix, _, rest = shown.partition("-")
        key_id, _, secret = rest.partition("-")
        entry = self._entries.get(key_id)
        digest = key_digest(self._pepper, key_id, secret)
        equal = hmac.compare_digest(digest, self._nobody if entry is None else entry.digest)
        if entry is None or not equal or prefix != PREFIX:
            return None
        return entry if entry.expires is None or now < entry.expires else None

    def rights(self, entry: KeyEntry) -> Rights:
        """What requests with this key may be."""
        return self._rights[entry.id]

    def _rights_of(self, entry: KeyEntry) -> Rights:
        owner = prefix_owner(self._pepper, entry)
        return Rights(owner=owner, classes=entry.classes, priority=entry.priority, operator=entry.operator)
