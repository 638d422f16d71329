"""Decides from what past fetches took if a prefix is fetched from the KV pool. Pure: no torch, no clock, no I/O.

FetchCost weighs a fetch against computing the prefix here, DirectCost against its handoff by a prefill worker.
"""

from __future__ import annotations

from serving.engine.plan import StepRecord

SHARE = 0.2  # weight of the newest measurement in the running mean
PROMPT_TOKENS = 32  # steps of fewer tokens say little about what a prompt takes
PROBE_EVERY = 16  # fetches refused in a row until one is tried again: the pool may be faster by now


class Refusals:
    """Counts what was refused in a row, and lets every PROBE_EVERY-th be tried after all."""

    def __init__(self) -> None:
        self._refused = 0

    def allows(self, worth: bool) -> bool:
        """True if it is worth it, or a trial is due."""
        self._refused = 0 if worth or self._refused + 1 >= PROBE_EVERY else self._refused + 1
        return not self._refused


class FetchCost:
    """Running means of a prompt token's computing time, the pool's answer time, and what its bytes take.

    Until both sides have been measured a fetch is always worth trying. A fetch that a step follows layer by layer costs
    the prompt what it waits, not what the fetch takes: on a shared host it takes the longer the busier the step is.
    """

    def __init__(self) -> None:
        self.token_seconds: float | None = None
        self.answer_seconds = 0.0
        self.byte_seconds: float | None = None  # from the first to the last
        self.waiting_seconds: float | None = None  # a byte, of prompts that waited for fetches
        self._refusals = Refusals()

    def stepped(self, record: StepRecord) -> None:
        """A step of the engine has been measured."""
        if record.new_tokens >= PROMPT_TOKENS:
            self.token_seconds = _mean(self.token_seconds, record.busy_seconds / record.new_tokens)

    def answered(self, seconds: float) -> None:
        """A lookup has taken so long."""
        self.answer_seconds = _mean(self.answer_seconds, seconds)

    def fetched(self, size: int, seconds: float) -> None:
        """`size` bytes have come in so many seconds."""
        if size > 0:
            self.byte_seconds = _mean(self.byte_seconds, seconds / size)

    def waited(self, size: int, seconds: float) -> None:
        """A prompt has waited so long for `size` bytes, before it was begun and at its layers."""
        if size > 0:
            self.waiting_seconds = _mean(self.waiting_seconds, seconds / size)

    def pays(self, tokens: int, size: int, *, followed: bool = True) -> bool:
        """True if a prompt likely waits less for `size` bytes of KV than for computing the `tokens` they are of.

        Unless it can be `followed` layer by layer, it waits for all of the fetch.
        """
        byte_seconds = self.waiting_seconds if followed else self.byte_seconds
        if self.token_seconds is None or byte_seconds is None:
            return True
        return self._refusals.allows(self.answer_seconds + size * byte_seconds < tokens * self.token_seconds)


class HandoffMeter:
    """One handoff as its receiver measures it: `byte_seconds`, what a byte took at best; None before a second chunk.

    Most chunks wait for their layer to be computed. The quickest one did not, and shows what the transport takes.
    """

    __slots__ = ("_last", "byte_seconds")

    def __init__(self) -> None:
        self.byte_seconds: float | None = None
        self._last: float | None = None

    def came(self, size: int, now: float) -> None:
        """A chunk has been taken in that is `size` bytes where it lies now."""
        if self._last is not None and size > 0:
            seconds = max(0.0, now - self._last) / size
            self.byte_seconds = seconds if self.byte_seconds is None else min(self.byte_seconds, seconds)
        self._last = now


class DirectCost:
    """Fetches into leases against handoffs, in seconds a byte of KV as this worker stores it, however it travelled.

    `fetch` is what the pool has taken. Until both have been measured the pool is always worth trying; after a failure
    it is not tried for the next PROBE_EVERY prefixes.
    """

    def __init__(self, fetch: FetchCost):
        self.fetch = fetch
        self.byte_seconds: float | None = None  # of handoffs
        self._refusals = Refusals()
        self._resting = 0  # prefixes that are not tried before the next

    def handed_over(self, meter: HandoffMeter) -> None:
        """A handoff is complete."""
        if meter.byte_seconds is not None:
            self.byte_seconds = _mean(self.byte_seconds, meter.byte_seconds)

    def failed(self) -> None:
        """The pool did not bring what it had, or not in time."""
        self._resting = PROBE_EVERY

    def pays(self, size: int) -> bool:
        """True if `size` bytes likely come from the pool no later than they would from a prefill worker.

        What pays for some bytes pays for more.
        """
        if self._resting:
            self._resting -= 1
            return False
        if self.fetch.byte_seconds is None or self.byte_seconds is None:
            return True
        pooled = self.fetch.answer_seconds + size * self.fetch.byte_seconds
        return self._refusals.allows(pooled <= size * self.byte_seconds)

    def patience(self, size: int) -> float | None:
        """Seconds to wait for `size` bytes on their way before they are asked of the prefill worker; None: no bound.

        As long as the handoff would take: so the two together take at most twice what the better one had taken.
        """
        return None if self.byte_seconds is None else size * self.byte_seconds


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SHARE * (new - old)
