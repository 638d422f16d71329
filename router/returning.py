"""Workers that a router knew in its life before: what it kept of them is theirs until they report, or time is up.

Pure; `now` comes in. It does not know what is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from serving.messages import WorkerStatus


class Returning:
    """Workers by instance, that have not reported yet."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._until = 0.0

    def expect(self, names: Mapping[str, str], until: float) -> None:
        """Wait for these instances, by the names of their workers, until that time."""
        self._names, self._until = dict(names), until

    def heard(self, status: WorkerStatus) -> bool:
        """A worker has reported; True if it is another instance than was waited for under its name."""
        if not self._names:
            return False
        self._names.pop(status.instance, None)
        gone = [instance for instance, name in self._names.items() if name == status.name]
        for instance in gone:
            del self._names[instance]
        return bool(gone)

    def instances(self, now: float) -> Collection[str]:
        """Those that may still come."""
        if now > self._until:
            self._names = {}
        return self._names.keys()

    @property
    def names(self) -> Mapping[str, str]:
        """By instance."""
        return self._names
