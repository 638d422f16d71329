"""Whether fetching a prefix beats computing it, from what both have taken so far. Pure: no torch, no clock, no I/O."""

from __future__ import annotations

from serving.engine.record import StepRecord

SHARE = 0.2  # weight of the newest measurement in the running mean
PROMPT_TOKENS = 32  # steps of fewer tokens say little about what a prompt takes
PROBE_EVERY = 16  # fetches refused in a row until one is tried again: the pool may be faster by now


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
        self._refused = 0

    def stepped(self, record: StepRecord) -> None:
        """A step of the engine has been measured."""
        if record.new_tokens >= PROMPT_TOKENS:
            self.token_seconds = _mean(self.token_seconds, record.busy_seconds / record.new_tokens)

    def answered(self, seconds: float) -> None:
        """A lookup has taken so long."""
        self.answer_seconds = _mean(self.answer_seconds, seconds)

    def fetched(self, size: int, seconds: float) -> None:
        """So many bytes have come in so many seconds."""
        if size > 0:
            self.byte_seconds = _mean(self.byte_seconds, seconds / size)

    def waited(self, size: int, seconds: float) -> None:
        """A prompt has waited so long for so many bytes, before it was begun and at its layers."""
        if size > 0:
            self.waiting_seconds = _mean(self.waiting_seconds, seconds / size)

    def pays(self, tokens: int, size: int, *, followed: bool = True) -> bool:
        """Whether a prompt likely waits less for `size` bytes of KV than for computing the `tokens` they are of.

        Unless it can be `followed` layer by layer, it waits for all of the fetch.
        """
        byte_seconds = self.waiting_seconds if followed else self.byte_seconds
        if self.token_seconds is None or byte_seconds is None:
            return True
        worth = self.answer_seconds + size * byte_seconds < tokens * self.token_seconds
        self._refused = 0 if worth else self._refused + 1
        if self._refused >= PROBE_EVERY:
            self._refused = 0
            return True
        return worth


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SHARE * (new - old)
