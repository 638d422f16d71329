"""The nodes of the KV pool as this router has heard of them, for workers to use and for metrics. Pure; `now` comes in.

Silence, and a node is gone: workers find another owner for its keys at once, and nothing waits for it to come back.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.messages import PoolReport


@dataclass(frozen=True, slots=True)
class _Heard:
    report: PoolReport
    at: float


class PoolNodes:
    """Nodes by address. `silence` in seconds."""

    def __init__(self, silence: float = 5.0):
        self.silence = silence
        self._heard: dict[str, _Heard] = {}
        self._replaced: set[str] = set()  # instances that a node of their name took the place of

    def heartbeat(self, report: PoolReport, now: float) -> bool:
        """Take a report in; True if the node is new, in a new life, or has begun to leave."""
        before = self._heard.get(report.address)
        if before is None:
            self._replace_previous_life(report)
        self._heard[report.address] = _Heard(report, now)
        if before is None:
            return True
        then = before.report
        return (then.stat.instance, then.draining) != (report.stat.instance, report.draining)

    def _replace_previous_life(self, report: PoolReport) -> None:
        """A node that comes back under its name is not also still where it was.

        Once only: if what it replaced reports again, two nodes share a name, and both are there.
        """
        if report.stat.instance in self._replaced:
            return
        for address, heard in list(self._heard.items()):
            if heard.report.stat.name == report.stat.name:
                self._replaced.add(heard.report.stat.instance)
                del self._heard[address]

    def namesakes(self, report: PoolReport) -> list[str]:
        """Where else nodes of its name are, none of them leaving: keys are drawn by names, so one of them gets none."""
        usable = [heard.report for heard in self._heard.values() if not heard.report.draining]
        if report.draining:
            return []
        return [one.address for one in usable if one.stat.name == report.stat.name and one.address != report.address]

    def excuse(self, now: float) -> None:
        """Nobody was listening until now: every node has a whole silence to be heard in."""
        self._heard = {address: _Heard(heard.report, now) for address, heard in self._heard.items()}

    def expire(self, now: float) -> list[PoolReport]:
        """Nodes that have fallen silent, as they last were; they are forgotten."""
        gone = [heard.report for heard in self._heard.values() if now - heard.at > self.silence]
        for report in gone:
            del self._heard[report.address]
        return gone

    def nodes(self) -> list[str]:
        """Where workers may store and look, as `name@host:port`: nodes that are not leaving, in a stable order."""
        usable = (heard.report for heard in self._heard.values() if not heard.report.draining)
        return sorted(f"{report.stat.name}@{report.address}" for report in usable)

    def reports(self) -> list[PoolReport]:
        """The last word of every node, by name."""
        return sorted((heard.report for heard in self._heard.values()), key=lambda report: report.stat.name)
