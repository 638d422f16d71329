"""Circuit breakers: whom the router gives no work because calls there failed, and when it tries again.

One for each worker and one for each way from a prefill to a decode worker. Pure: `now` comes in, in seconds.

    CLOSED ──failure──► OPEN ──a call is begun──► HALF_OPEN ──success──► CLOSED
                          ▲                            │
                          └───failure, a longer pause──┘
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class BreakerState(IntEnum):
    """The numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerConfig:
    """Seconds. A pause is `first_pause` times 2 for each failure in a row, and up to `jitter` of it longer.

    A breaker that has been closed for `forgive_after` begins with the first pause again: one that works for a moment
    between failures does not.
    """

    first_pause: float = 0.5
    longest_pause: float = 30.0
    jitter: float = 0.25
    forgive_after: float = 60.0
    seed: int = 0


class Breaker:
    """The breaker of one worker or link, called `name` for its jitter.

    Tell it of server faults alone: what a client has asked wrongly says nothing about who answers. While it is OPEN
    the ends of calls begun before change nothing, so that one cause counts once.
    """

    __slots__ = ("closed_at", "config", "name", "opened", "retry_at", "state")

    def __init__(self, config: BreakerConfig, name: str):
        self.config = config
        self.name = name
        self.state = BreakerState.CLOSED
        self.opened = 0  # times in a row
        self.retry_at = 0.0  # no call before, once it is not closed
        self.closed_at = 0.0

    def allows(self, now: float) -> bool:
        """True if a call may be begun: always while closed, else once the pause is over and no trial is in progress."""
        return self.state is BreakerState.CLOSED or now >= self.retry_at

    def begin(self, now: float) -> None:
        """A call is begun. Unless closed it is the trial, and has as long as the pause was until another may follow."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.HALF_OPEN
            self.retry_at = now + self._pause()

    def failed(self, now: float) -> bool:
        """A call has failed; True if the breaker opens."""
        if self.state is BreakerState.OPEN:
            return False
        if self.state is BreakerState.CLOSED and now - self.closed_at > self.config.forgive_after:
            self.opened = 0
        self.opened += 1
        self.state = BreakerState.OPEN
        self.retry_at = now + self._pause()
        return True

    def succeeded(self, now: float) -> bool:
        """A call has done its work; True if that closes the breaker."""
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self.state = BreakerState.CLOSED
        self.closed_at = now
        return True

    def forgiven(self, now: float) -> bool:
        """True if nothing is left to remember."""
        return self.state is BreakerState.CLOSED and now - self.closed_at > self.config.forgive_after

    def _pause(self) -> float:
        config = self.config
        doubled = config.first_pause * 2.0 ** min(self.opened - 1, 32)
        chance = zlib.crc32(f"{config.seed}/{self.name}/{self.opened}".encode()) / 2**32
        return min(doubled, config.longest_pause) * (1.0 + config.jitter * chance)


class Breakers(Generic[Key]):
    """Breakers by key. Only those that have failed exist; the others are closed."""

    def __init__(self, config: BreakerConfig):
        self.config = config
        self._breakers: dict[Key, Breaker] = {}

    def allows(self, key: Key, now: float) -> bool:
        breaker = self._breakers.get(key)
        return breaker is None or breaker.allows(now)

    def retry_at(self, key: Key) -> float:
        """When the next call may be begun; 0 where nothing has to be waited for."""
        breaker = self._breakers.get(key)
        return 0.0 if breaker is None or breaker.state is BreakerState.CLOSED else breaker.retry_at

    def begin(self, key: Key, now: float) -> None:
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.begin(now)

    def failed(self, key: Key, now: float) -> bool:
        """True if the breaker opens."""
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = Breaker(self.config, str(key))
        return breaker.failed(now)

    def succeeded(self, key: Key, now: float) -> bool:
        """True if that closes the breaker."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.succeeded(now)

    def state(self, key: Key) -> BreakerState:
        breaker = self._breakers.get(key)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def unwell(self) -> set[Key]:
        """What is not closed."""
        return {key for key, breaker in self._breakers.items() if breaker.state is not BreakerState.CLOSED}

    def retain(self, known: Callable[[Key], bool], now: float) -> None:
        """Forget the breakers of what is gone, and those that have long been closed."""
        for key, breaker in list(self._breakers.items()):
            if not known(key) or breaker.forgiven(now):
                del self._breakers[key]

    def __len__(self) -> int:
        return len(self._breakers)


class Links:
    """The ways from prefill to decode workers, by instances. A worker hands itself nothing over: that always goes."""

    def __init__(self, config: BreakerConfig):
        self.breakers: Breakers[tuple[str, str]] = Breakers(config)

    def allows(self, prefill: str, decode: str, now: float) -> bool:
        """True if the pair may be given a request."""
        return prefill == decode or self.breakers.allows((prefill, decode), now)

    def retry_at(self, prefill: str, decode: str) -> float:
        return 0.0 if prefill == decode else self.breakers.retry_at((prefill, decode))

    def begin(self, prefill: str, decode: str, now: float) -> None:
        self.breakers.begin((prefill, decode), now)

    def failed(self, prefill: str, decode: str, now: float) -> bool:
        """True if the pair's breaker opens."""
        return prefill != decode and self.breakers.failed((prefill, decode), now)

    def succeeded(self, prefill: str, decode: str, now: float) -> bool:
        """True if that closes the pair's breaker."""
        return self.breakers.succeeded((prefill, decode), now)

    def state(self, prefill: str, decode: str) -> BreakerState:
        return self.breakers.state((prefill, decode))

    def barred(self) -> set[tuple[str, str]]:
        """The pairs whose breakers are not closed."""
        return self.breakers.unwell()

    def retain(self, known: Callable[[str], bool], now: float) -> None:
        """Forget the ways from and to workers that are gone."""
        self.breakers.retain(lambda pair: known(pair[0]) and known(pair[1]), now)
