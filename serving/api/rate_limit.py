"""Rate limits by API key, in requests and in tokens a minute: token buckets that fill all the time. Pure.

A key's bucket holds a minute's worth at most. What was taken for output tokens that never came is given back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from serving.errors import RateLimited, TokenRateLimited

MINUTE = 60.0
MOST_KEYS = 4096  # buckets kept: those used longest ago are forgotten, and are full when they come back


@dataclass(slots=True)
class TokenBucket:
    """Holds `capacity` at most, and fills with that much a minute. Made full; `at` is when `held` was right."""

    capacity: float
    held: float
    at: float

    def level(self, now: float) -> float:
        """What it holds now."""
        return min(self.capacity, self.held + max(0.0, now - self.at) * self.capacity / MINUTE)

    def take(self, amount: float, now: float) -> bool:
        """Take it out, if it is there."""
        self.held, self.at = self.level(now), max(self.at, now)
        if amount > self.held:
            return False
        self.held -= amount
        return True

    def put(self, amount: float, now: float) -> None:
        """Give back what was not needed; more than it holds runs over."""
        self.held, self.at = min(self.capacity, self.level(now) + amount), max(self.at, now)

    def seconds_until(self, amount: float, now: float) -> float | None:
        """Until it holds so much; None: never."""
        if amount > self.capacity:
            return None
        return max(0.0, amount - self.level(now)) * MINUTE / self.capacity


class Limit:
    """A limit of so many a minute for each key."""

    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._buckets)

    def bucket(self, key: str, now: float) -> TokenBucket:
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = TokenBucket(self.per_minute, self.per_minute, now)
            while len(self._buckets) > MOST_KEYS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return found

    def headers(self, what: str, key: str, now: float) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers; `what` is requests or tokens."""
        bucket = self.bucket(key, now)
        reset = bucket.seconds_until(bucket.capacity, now) or 0.0
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(math.floor(bucket.level(now))),
            f"x-ratelimit-reset-{what}": shown_seconds(reset),
        }


class RateLimiter:
    """Both limits; None: any number. Keys are what tells clients apart, and never shown."""

    def __init__(self, requests: int | None = None, tokens: int | None = None):
        self.requests = Limit(requests) if requests is not None else None
        self.tokens = Limit(tokens) if tokens is not None else None

    def request(self, key: str, now: float) -> None:
        """A request has come. Raises RateLimited."""
        if self.requests is None:
            return
        bucket = self.requests.bucket(key, now)
        if not bucket.take(1, now):
            raise _refusal(RateLimited, "requests per min (RPM)", bucket, 1, now)

    def spend(self, key: str, tokens: int, now: float) -> None:
        """The request may come to so many tokens, of prompts and outputs. Raises TokenRateLimited."""
        if self.tokens is None:
            return
        bucket = self.tokens.bucket(key, now)
        if not bucket.take(tokens, now):
            raise _refusal(TokenRateLimited, "tokens per min (TPM)", bucket, tokens, now)

    def refund(self, key: str, tokens: int, now: float) -> None:
        """So many of those have not come."""
        if self.tokens is not None and tokens > 0:
            self.tokens.bucket(key, now).put(tokens, now)

    def headers(self, key: str, now: float) -> dict[str, str]:
        """What the key has left, for the headers of an answer."""
        found: dict[str, str] = {}
        for what, limit in (("requests", self.requests), ("tokens", self.tokens)):
            if limit is not None:
                found |= limit.headers(what, key, now)
        return found


def _refusal(kind: type[RateLimited], what: str, bucket: TokenBucket, wanted: int, now: float) -> RateLimited:
    """OpenAI's words. A request that asks for more than a minute's worth has no time after which to come again."""
    limit, used = math.floor(bucket.capacity), math.ceil(bucket.capacity - bucket.level(now))
    wait = bucket.seconds_until(wanted, now)
    if wait is None:
        text = f"Request too large on {what}: Limit {limit}, Requested {wanted}."
        return kind(text, code="rate_limit_exceeded")
    text = f"Rate limit reached on {what}: Limit {limit}, Used {used}, Requested {wanted}."
    return kind(f"{text} Please try again in {shown_seconds(wait)}.", code="rate_limit_exceeded", retry_after=wait)


def shown_seconds(seconds: float) -> str:
    """As OpenAI writes times: `20ms`, `1.5s`, `6m0s`. Rounded up, so that whoever waits so long has waited enough."""
    milliseconds = math.ceil(seconds * 1e3 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1e3:g}s"
