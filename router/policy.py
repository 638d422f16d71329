"""Which workers a request goes to. Pure: statuses in, a placement or None out; no torch, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from serving.messages import Request, Role, WorkerStatus


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the router sees it: its last heartbeat plus what the router itself has sent there since."""

    status: WorkerStatus
    leases: int = 0  # this router's open leases (decode)
    prefill_tokens: int = 0  # prompt tokens this router has sent and not seen finished (prefill)

    @property
    def prefills(self) -> bool:
        return self.status.role in (Role.PREFILL, Role.MIXED)

    @property
    def decodes(self) -> bool:
        return self.status.role in (Role.DECODE, Role.MIXED)


class LeastLoaded:
    """Decode where the fewest sequences run for the room there is, prefill where the fewest tokens wait.

    A request whose decode lands on a mixed worker is prefilled there too: its handoff then costs nothing.
    """

    def decode_order(self, request: Request, workers: Iterable[Candidate], fingerprint: str | None) -> list[Candidate]:
        """Workers that could decode the request, best first; of this fingerprint, once the request has one."""
        able = [
            worker
            for worker in workers
            if worker.decodes and not worker.status.draining and fingerprint in (None, worker.status.fingerprint)
        ]
        return sorted(able, key=lambda worker: (_load(worker), worker.status.name))

    def prefill_order(
        self, request: Request, workers: Iterable[Candidate], pairing: str | None, avoid: Collection[str]
    ) -> list[Candidate]:
        """Workers that could prefill for a request, or a decode worker, of this pairing, best first."""
        able = [
            worker
            for worker in workers
            if worker.prefills
            and not worker.status.draining
            and worker.status.instance not in avoid
            and pairing in (None, worker.status.pairing)
        ]
        return sorted(able, key=lambda worker: (_queue(worker), worker.status.name))


def _load(worker: Candidate) -> float:
    """Share of the worker's sequence slots or of its blocks that is taken, whichever is more."""
    status = worker.status
    slots = max(worker.leases, status.running + status.waiting) / max(1, status.max_seqs)
    blocks = 1 - status.free_blocks / max(1, status.total_blocks)
    return max(slots, blocks)


def _queue(worker: Candidate) -> int:
    return max(worker.prefill_tokens, worker.status.waiting_tokens)
