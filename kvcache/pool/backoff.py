"""Which nodes are not asked after they failed, and for how long. Pure: `now` is handed in, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE = 0.5  # seconds after a first failure; doubles with each probe that fails
LONGEST_PAUSE = 15.0


@dataclass(slots=True)
class _Pause:
    until: float
    seconds: float
    probing: bool = False  # one caller has been let through since the pause was over


class Backoff:
    """A node that failed is not asked for a while, then by one caller, and by all again once it has answered."""

    def __init__(self, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE):
        self.first = first
        self.longest = longest
        self._paused: dict[str, _Pause] = {}

    def may_ask(self, node: str, now: float) -> bool:
        """True if the node may be asked. After a pause it is True once: that call is the probe, others wait on."""
        pause = self._paused.get(node)
        if pause is None:
            return True
        if now < pause.until:
            return False
        pause.probing = True
        pause.until = now + pause.seconds  # a probe without an answer does not exclude the node for good
        return True

    def failed(self, node: str, now: float) -> bool:
        """It did not answer: of concurrent calls the first counts. True if the pause begins now."""
        pause = self._paused.get(node)
        if pause is None:
            self._paused[node] = _Pause(now + self.first, self.first)
            return True
        if pause.probing:
            pause.seconds = min(2 * pause.seconds, self.longest)
            pause.until = now + pause.seconds
            pause.probing = False
        return False

    def answered(self, node: str) -> None:
        """It may be asked from now on, by all."""
        self._paused.pop(node, None)
