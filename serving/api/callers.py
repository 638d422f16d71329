"""Who sends an HTTP request: the API key it shows, whose limits it counts towards, and what it may be.

Keys come from `--api-key`, all of one tenant, from a keyring, or from both. They are compared in constant time, and
nothing here is logged.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from starlette.datastructures import Headers

from serving.api.keyring import Keyring
from serving.api.plan import Rights
from serving.api.rate_limit import KeyLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiCaller:
    """`name` tells those apart who share fairly: a key of `--api-key`, or a tenant; empty where no key is required."""

    name: str = ""
    account: str = ""  # whose limits are used
    limits: KeyLimits | None = None  # its own; None: the server's
    rights: Rights = field(default_factory=Rights)
    key_id: str = ""  # of a stored key, which is no secret


ANYBODY = ApiCaller()


class Callers:
    """Reads callers from headers. `api_key` may be several, with commas between them; `now` is in Unix seconds."""

    def __init__(self, api_key: str | None, keyring: Keyring | None, now: Callable[[], float]):
        # Digests have one length, so a comparison says nothing about the length of a key either.
        self._keys = [sha256(key.encode()).digest() for key in (api_key or "").split(",") if key]
        self._keyring = keyring
        self._now = now
        self.required = bool(self._keys) or keyring is not None
        self.refused = 0

    def of(self, headers: Headers) -> ApiCaller | None:
        """By the valid key that they show in one of two ways; None without one."""
        found: ApiCaller | None = None
        for shown in _shown(headers):
            caller = self._own(shown) or self._stored(shown)
            found = found or caller
        self.refused += found is None
        return found

    def _own(self, shown: str) -> ApiCaller | None:
        digest = sha256(shown.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them: no early end
        if not any(matches):
            return None
        name = digest.hex()[:16]
        return ApiCaller(name=name, account=name)

    def _stored(self, shown: str) -> ApiCaller | None:
        entry = None if self._keyring is None else self._keyring.find(shown, self._now())
        if entry is None or self._keyring is None:
            return None
        name, account = f"tenant {entry.tenant}", f"key {entry.id}"
        return ApiCaller(
            name=name, account=account, limits=entry.limits, rights=self._keyring.rights(entry), key_id=entry.id
        )


def _shown(headers: Headers) -> Iterator[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    for key in (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
        yield key.strip(" \t")
