"""Limits of API keys: requests and tokens a minute, as buckets that fill all the time, and requests at a time. Pure.

A request reserves what it may come to and gives back what it did not use, exactly once (LimitReservation). Nothing here
knows what a key is: accounts have names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from serving.errors import ConcurrencyLimited, RateLimited, TokenRateLimited

MINUTE = 60.0
BUSY_RETRY_S = 1.0  # where an account has as many requests as it may: nobody knows when one of them ends
MOST_ACCOUNTS = 16_384  # more than there may be keys (serving.api.keyring); those used longest ago are forgotten


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

    def resize(self, capacity: float, now: float) -> None:
        """Hold so much at most from now on. What has been used stays used."""
        used = self.capacity - self.level(now)
        self.capacity, self.held, self.at = capacity, max(0.0, capacity - used), max(self.at, now)

    def seconds_until(self, amount: float, now: float) -> float | None:
        """Until it holds so much; None: never."""
        if amount > self.capacity:
            return None
        return max(0.0, amount - self.level(now)) * MINUTE / self.capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """None: any number."""

    requests: int | None = None  # a minute
    tokens: int | None = None  # a minute, of prompts and outputs
    concurrent: int | None = None  # requests in progress

    def over(self, base: KeyLimits) -> KeyLimits:
        """These, and those of `base` where these name none."""
        return KeyLimits(
            requests=base.requests if self.requests is None else self.requests,
            tokens=base.tokens if self.tokens is None else self.tokens,
            concurrent=base.concurrent if self.concurrent is None else self.concurrent,
        )


class Account:
    """What one key has used of its limits."""

    def __init__(self) -> None:
        self.limits = KeyLimits()
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.running = 0

    def hold_to(self, limits: KeyLimits, now: float) -> None:
        """From now on. They change when a file of keys does."""
        if limits != self.limits:
            self.limits = limits
            self.requests = _resized(self.requests, limits.requests, now)
            self.tokens = _resized(self.tokens, limits.tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers, of the limits there are."""
        found: dict[str, str] = {}
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                reset = bucket.seconds_until(bucket.capacity, now) or 0.0
                found[f"x-ratelimit-limit-{what}"] = str(math.floor(bucket.capacity))
                found[f"x-ratelimit-remaining-{what}"] = str(math.floor(bucket.level(now)))
                found[f"x-ratelimit-reset-{what}"] = shown_seconds(reset)
        return found


def _resized(bucket: TokenBucket | None, capacity: int | None, now: float) -> TokenBucket | None:
    if capacity is None:
        return None
    if bucket is None:
        return TokenBucket(capacity, capacity, now)
    bucket.resize(capacity, now)
    return bucket


class LimitReservation:
    """What one request holds of its account, from RateLimiter.open until `close`.

    `used` are the tokens it came to, by default all it reserved. A `void` request was refused or failed, and counts
    for nothing.
    """

    __slots__ = ("_account", "_closed", "_reserved", "used", "void")

    def __init__(self, account: Account):
        self._account = account
        self._reserved = 0
        self._closed = False
        self.used: int | None = None
        self.void = False

    def spend(self, tokens: int, now: float) -> None:
        """The request may come to so many tokens, of prompts and outputs. Raises TokenRateLimited."""
        bucket = self._account.tokens
        if bucket is not None:
            if not bucket.take(tokens, now):
                raise _refusal(TokenRateLimited, "tokens per min (TPM)", bucket, tokens, now)
            self._reserved += tokens

    def close(self, now: float) -> None:
        """The request has ended, in whatever way: give back what it did not use."""
        assert not self._closed, "what a request reserved is given back once"
        self._closed = True
        account = self._account
        account.running -= 1
        if self.void and account.requests is not None:
            account.requests.put(1, now)
        used = 0 if self.void else self._reserved if self.used is None else self.used
        if account.tokens is not None and used < self._reserved:
            account.tokens.put(self._reserved - used, now)

    def headers(self, now: float) -> dict[str, str]:
        """What the account has left, for the headers of an answer."""
        return self._account.headers(now)


class RateLimiter:
    """Accounts by name, which are never shown. `base` are the limits where an account has none of its own."""

    def __init__(self, base: KeyLimits | None = None):
        self.base = base or KeyLimits()
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, name: str, limits: KeyLimits | None, now: float) -> LimitReservation:
        """A request has come; close what it is given. Raises ConcurrencyLimited and RateLimited, with nothing taken."""
        account = self.account(name, limits, now)
        most, bucket = account.limits.concurrent, account.requests
        if most is not None and account.running >= most:
            text = f"Rate limit reached on concurrent requests: Limit {most}, Running {account.running}, Requested 1."
            raise ConcurrencyLimited(text, code="rate_limit_exceeded", retry_after=BUSY_RETRY_S)
        if bucket is not None and not bucket.take(1, now):
            raise _refusal(RateLimited, "requests per min (RPM)", bucket, 1, now)
        account.running += 1
        return LimitReservation(account)

    def account(self, name: str, limits: KeyLimits | None, now: float) -> Account:
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = Account()
            self._forget()
        found.hold_to((limits or self.base).over(self.base), now)
        self._accounts.move_to_end(name)
        return found

    def _forget(self) -> None:
        """Those used longest ago; not the newest, nor those with requests in progress."""
        excess = len(self._accounts) - MOST_ACCOUNTS
        if excess > 0:
            newest = next(reversed(self._accounts))
            idle = [name for name, one in self._accounts.items() if not one.running and name != newest]
            for name in idle[:excess]:
                del self._accounts[name]


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
