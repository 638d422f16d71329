"""Which parts of a memory are lent: each to one transfer at a time, and to none while a late write may hit it.

Pure: the caller says what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Lending:
    """`parts` equal parts, by number. One whose user may still write rests `rest_seconds` before it is lent again."""

    parts: int
    rest_seconds: float
    free: list[int] = field(init=False)  # the last one returned is lent first: its memory is warm
    lent: set[int] = field(init=False, default_factory=set)
    resting: dict[int, float] = field(init=False, default_factory=dict)  # part → when it may be lent again

    def __post_init__(self) -> None:
        self.free = list(reversed(range(self.parts)))

    def lend(self, now: float) -> int | None:
        """A part that no transfer writes to; None if there is none."""
        rested = [part for part, until in self.resting.items() if until <= now]
        for part in rested:
            del self.resting[part]
        self.free[:0] = rested  # behind all others
        if not self.free:
            return None
        part = self.free.pop()
        self.lent.add(part)
        return part

    def take_back(self, part: int, now: float, *, settled: bool) -> None:
        """The transfer is over; unless `settled`, a write of its may still be on the way."""
        assert part in self.lent, f"part {part} is not lent"
        self.lent.remove(part)
        if settled:
            self.free.append(part)
        else:
            self.resting[part] = now + self.rest_seconds
