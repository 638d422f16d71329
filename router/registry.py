"""The live registry: which workers there are, how loaded, and whether they can be believed. Pure; `now` comes in.

heartbeat ──► live ──(silent, or a call broke)──► suspect ──heartbeat──► live
                                                    └──(silent for long)──► forgotten
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.policy import Candidate
from serving.messages import WorkerStatus


@dataclass(slots=True)
class RegisteredWorker:
    """A registered worker. `suspect` since a call to it broke; a later heartbeat clears it.

    `made_at`: when its status was made, on the router's clock.
    """

    status: WorkerStatus
    seen: float
    made_at: float
    suspect: bool = False
    leases: int = 0
    prefill_tokens: int = 0


class Registry:
    """Workers by instance id. `silence` seconds without a heartbeat make one suspect, three times that forgotten."""

    def __init__(self, silence: float = 5.0):
        self.silence = silence
        self.workers: dict[str, RegisteredWorker] = {}

    def heartbeat(self, status: WorkerStatus, now: float, *, made_at: float | None = None) -> bool:
        """Take a heartbeat in, made now or at `made_at`; True if the worker is new or believed again."""
        made_at = now if made_at is None else made_at
        worker = self.workers.get(status.instance)
        if worker is None:
            self._replace_previous_life(status)
            self.workers[status.instance] = RegisteredWorker(status, now, made_at)
            return True
        news = worker.suspect or worker.status.draining != status.draining
        worker.status, worker.seen, worker.made_at, worker.suspect = status, now, made_at, False
        return news

    def _replace_previous_life(self, status: WorkerStatus) -> None:
        """A worker that comes back under its name and address is not also still there under its old instance."""
        for instance, worker in list(self.workers.items()):
            if (worker.status.name, worker.status.address) == (status.name, status.address):
                del self.workers[instance]

    def suspect(self, instance: str) -> None:
        """A call to it broke: send nothing there until it is heard of again."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.suspect = True

    def leaves(self, instance: str) -> None:
        """It has said that it drains, before a heartbeat did: send nothing new there."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.status = replace(worker.status, draining=True)

    def excuse(self, now: float) -> None:
        """Nobody was listening until now: every worker has a whole silence to be heard in."""
        for worker in self.workers.values():
            worker.seen = now

    def expire(self, now: float) -> list[str]:
        """Instances that have just fallen silent; long-silent ones are forgotten."""
        fallen = []
        for instance, worker in list(self.workers.items()):
            silent = now - worker.seen
            if silent > self.silence and not worker.suspect:
                worker.suspect = True
                fallen.append(instance)
            if silent > 3 * self.silence:
                del self.workers[instance]
        return fallen

    def candidates(self) -> list[Candidate]:
        """Workers that may be given work, as the policy wants them."""
        return [
            Candidate(worker.status, worker.leases, worker.prefill_tokens)
            for worker in self.workers.values()
            if not worker.suspect
        ]

    def get(self, instance: str) -> RegisteredWorker | None:
        return self.workers.get(instance)
