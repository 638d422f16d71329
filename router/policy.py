"""Which workers a request goes to: policies that rank workers, and the rules about who may take a request at all.

Pure: what is known of the workers comes in, an order goes out. No torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from serving.messages import Build, Role, WorkerStatus

IN_USE_WEIGHT = 1 / 8  # of a token of KV in use, which every decode step reads, against a prompt token to compute


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the router sees it: its last heartbeat plus what the router itself has sent there since."""

    status: WorkerStatus
    leases: int = 0  # this router's open leases (decode)
    prefill_tokens: int = 0  # prompt tokens this router has sent to be computed and not seen finished (prefill)

    @property
    def prefills(self) -> bool:
        return self.status.role in (Role.PREFILL, Role.MIXED)

    @property
    def decodes(self) -> bool:
        return self.status.role in (Role.DECODE, Role.MIXED)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are computed before those of a request sent now."""
        return max(self.prefill_tokens, self.status.waiting_tokens)

    @property
    def load(self) -> float:
        """Share of the worker's sequences or of its KV blocks that is taken, whichever is more."""
        status = self.status
        sequences = max(self.leases, status.running + status.waiting) / max(1, status.max_seqs)
        blocks = 1 - status.free_blocks / max(1, status.total_blocks)
        return max(sequences, blocks)

    @property
    def kv_tokens_in_use(self) -> int:
        return (self.status.total_blocks - self.status.free_blocks) * self.status.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of a worker. `tokens` are its prompt and its output so far.

    `build` is what wrote the output so far, None while there is none: a text stays with its `fingerprint`, prefill with
    its `pairing`. `cached` are tokens of the leading blocks that a worker holds already, by worker instance.
    """

    tokens: int
    build: Build | None = None
    cached: Mapping[str, int] = field(default_factory=dict)

    def uncached(self, worker: Candidate) -> int:
        """Tokens this worker would have to compute."""
        return self.tokens - self.cached.get(worker.status.instance, 0)

    def streams(self, worker: Candidate) -> bool:
        """True if the worker's device cannot hold all tokens: every step would read some KV from host memory."""
        return self.tokens >= worker.status.total_blocks * worker.status.block_size


class Policy(Protocol):
    """Ranks the workers that may take a request, best first. Every worker given is in the answer once."""

    needs_prefixes: ClassVar[bool]  # True: the router follows the workers' KV events and fills in Demand.cached

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]: ...
    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]: ...


class LeastLoaded:
    """Decode where the smallest share of sequences and KV is taken, prefill where the fewest tokens wait."""

    needs_prefixes: ClassVar[bool] = False

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        return sorted(workers, key=lambda worker: (demand.streams(worker), worker.load, worker.status.name))

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        return sorted(workers, key=lambda worker: (demand.streams(worker), worker.queued_tokens, worker.status.name))


class PrefixAware:
    """The worker that has the least to compute before the first token: its queue and the tokens it has not cached.

    A worker that decodes much is charged for the KV its steps read, so that one popular prefix does not draw every
    request to one worker. The form of the cost is that of NVIDIA Dynamo's KV router (prefill blocks to compute plus
    active decode blocks), in tokens.
    """

    needs_prefixes: ClassVar[bool] = True

    def decode_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, bool, float, float, str]:
            work = demand.uncached(worker) + worker.queued_tokens + IN_USE_WEIGHT * worker.kv_tokens_in_use
            return demand.streams(worker), worker.load >= 1.0, work, worker.load, worker.status.name

        return sorted(workers, key=cost)

    def prefill_order(self, demand: Demand, workers: Sequence[Candidate]) -> list[Candidate]:
        def cost(worker: Candidate) -> tuple[bool, int, str]:
            return demand.streams(worker), demand.uncached(worker) + worker.queued_tokens, worker.status.name

        return sorted(workers, key=cost)


POLICIES: dict[str, type[Policy]] = {"least_loaded": LeastLoaded, "prefix_aware": PrefixAware}  # --routing-policy


def make_policy(name: str) -> Policy:
    return POLICIES[name]()


# ---- who may take a request at all, whatever the policy --------------------------------------------------------


def able_to_decode(demand: Demand, workers: Iterable[Candidate]) -> list[Candidate]:
    """Workers that decode, do not drain, and are of the text's build. Those that can hold it, while there are some."""
    fingerprint = demand.build.fingerprint if demand.build is not None else None
    return _holding(
        demand.tokens,
        [
            worker
            for worker in workers
            if worker.decodes and not worker.status.draining and fingerprint in (None, worker.status.fingerprint)
        ],
    )


def able_to_prefill(demand: Demand, workers: Iterable[Candidate], avoid: Collection[str] = ()) -> list[Candidate]:
    """Workers that prefill, do not drain, pair with the build and are not to be avoided (by instance)."""
    pairing = demand.build.pairing if demand.build is not None else None
    return _holding(
        demand.tokens,
        [
            worker
            for worker in workers
            if worker.prefills
            and not worker.status.draining
            and worker.status.instance not in avoid
            and pairing in (None, worker.status.pairing)
        ],
    )


def choose_prefill(
    policy: Policy, demand: Demand, workers: Sequence[Candidate], instance: str, avoid: Collection[str], *, begun: bool
) -> Candidate | None:
    """The lease's own worker (`instance`) where it prefills too, else the policy's best; None where there is none.

    A mixed worker computes the prompts of its own leases even while it drains (prefill.worker): the handoff costs
    nothing. A text that has `begun` and has outgrown all workers that prefill is computed by its decode worker,
    whatever its role.
    """
    able = able_to_prefill(demand, workers, avoid)
    last_resort = begun and outgrown(demand, able)
    for worker in workers:
        if worker.status.instance == instance and instance not in avoid and (worker.prefills or last_resort):
            return worker
    ranked = policy.prefill_order(demand, able)
    return ranked[0] if ranked else None


def pairs_of(workers: Iterable[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """The prefill and decode workers that a request may be given to together; a mixed worker is a pair of its own."""
    staying = [worker for worker in workers if not worker.status.draining]
    prefills: dict[str, list[Candidate]] = {}
    for worker in staying:
        if worker.prefills:
            prefills.setdefault(worker.status.pairing, []).append(worker)
    for decode in staying:
        if decode.decodes:
            for prefill in [decode] if decode.prefills else prefills.get(decode.status.pairing, ()):
                yield prefill, decode


def outgrown(demand: Demand, able: Collection[Candidate]) -> bool:
    """True if there are workers, and none of them can hold so many tokens."""
    return bool(able) and not any(demand.tokens < worker.status.max_model_len for worker in able)


def _holding(tokens: int, able: list[Candidate]) -> list[Candidate]:
    """Workers whose context leaves room to generate; all, if there is none: their refusal says why."""
    return [worker for worker in able if tokens < worker.status.max_model_len] or able
