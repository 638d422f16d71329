"""Which workers a request goes to. Pure: statuses in, a placement or None out; no torch, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from serving.messages import Role, WorkerStatus


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

    A request whose decode lands on a mixed worker is prefilled there too: its handoff then costs nothing. Workers that
    can never hold a request are left out while others can, and who holds it on the device comes before who needs host
    memory for it. `tokens` are the request's by now, those of its output among them.
    """

    def decode_order(self, tokens: int, workers: Iterable[Candidate], fingerprint: str | None) -> list[Candidate]:
        """Workers that could decode the request, best first; of this fingerprint, once the request has one."""
        able = [
            worker
            for worker in workers
            if worker.decodes and not worker.status.draining and fingerprint in (None, worker.status.fingerprint)
        ]
        return sorted(
            _holding(tokens, able), key=lambda worker: (_streams(tokens, worker), _load(worker), worker.status.name)
        )

    def prefill_order(
        self, tokens: int, workers: Iterable[Candidate], pairing: str | None, avoid: Collection[str]
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
        return sorted(
            _holding(tokens, able), key=lambda worker: (_streams(tokens, worker), _queue(worker), worker.status.name)
        )


def _holding(tokens: int, able: list[Candidate]) -> list[Candidate]:
    """Those whose context leaves room to generate after so many tokens; all, if there is none, for they say why not."""
    return [worker for worker in able if tokens < worker.status.max_model_len] or able


def outgrown(tokens: int, order: Collection[Candidate]) -> bool:
    """Whether there are workers in such an order, and none of them can hold so many tokens."""
    return bool(order) and not any(tokens < worker.status.max_model_len for worker in order)


def _streams(tokens: int, worker: Candidate) -> bool:
    """Whether the worker's device cannot hold them all: what lies in host memory passes by with every step."""
    return tokens >= worker.status.total_blocks * worker.status.block_size


def _load(worker: Candidate) -> float:
    """Share of the worker's sequence slots or of its blocks that is taken, whichever is more."""
    status = worker.status
    slots = max(worker.leases, status.running + status.waiting) / max(1, status.max_seqs)
    blocks = 1 - status.free_blocks / max(1, status.total_blocks)
    return max(slots, blocks)


def _queue(worker: Candidate) -> int:
    return max(worker.prefill_tokens, worker.status.waiting_tokens)
