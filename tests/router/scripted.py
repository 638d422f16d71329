"""Workers that live in memory and do as their script says: what a router meets, without engines, pools or sockets.

Their tokens are those of tests.prefill.scripted, so that every continuation can be checked against an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from router.breaker import BreakerConfig
from router.candidate import Candidate
from router.link_costs import LinkCosts
from router.policy import Demand, FleetView, able_to_decode, able_to_prefill
from router.trust import Trust, Ways
from serving.errors import MillraceError, StaleLease, WorkerLost
from serving.links import Deliver, LeaseEvent
from serving.messages import (
    Audit,
    Delta,
    FinishReason,
    LeaseGrant,
    LeaseId,
    LeaseOrder,
    Prefilled,
    PrefillOrder,
    Request,
    Role,
    WorkerStatus,
)
from tests.prefill.scripted import next_token


def make_status(name: str = "w", role: Role = Role.MIXED, **fields: Any) -> WorkerStatus:
    plain: dict[str, Any] = {
        "instance": f"{name}-life",
        "name": name,
        "role": role,
        "address": f"local:{name}",
        "fingerprint": "model",
        "pairing": "model",
        "model": "model",
        "max_model_len": 1000,
        "block_size": 16,
        "total_blocks": 100,
        "free_blocks": 100,
        "max_seqs": 8,
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
    }
    return WorkerStatus(**{**plain, **fields})


def lease_view(demand: Demand, workers: Sequence[Candidate]) -> FleetView:
    """The view of a router that trusts all of them."""
    ways = Ways(Trust(BreakerConfig(), stall=10.0), LinkCosts())
    return FleetView(able_to_decode(demand, workers), able_to_prefill(demand, workers), ways)


HANG = "hang"  # a script's word for never answering
LOSE = "lose"  # for the session's end
Step = MillraceError | BaseException | str | None


def draw(request: Request, tokens: list[int], cached: int = 0) -> Delta:
    """The next token after the output `tokens`."""
    token = next_token([*request.prompt, *tokens])
    last = len(tokens) + 1 >= request.sampling.max_tokens
    return Delta(
        index=len(tokens),
        tokens=(token,),
        finish=FinishReason.LENGTH if last else None,
        cached_tokens=cached,
    )


@dataclass
class Script:
    """What happens at each point, call by call; when a list is used up, all goes well. `steps` are per lease."""

    connect: list[Step] = field(default_factory=list)
    open: list[Step] = field(default_factory=list)
    advance: list[Step] = field(default_factory=list)
    before_first: list[Step] = field(default_factory=list)  # a prefill, before its first token
    after_first: list[Step] = field(default_factory=list)  # a prefill, before the KV has arrived
    committed: list[Step] = field(default_factory=list)  # a prefill, once the lease decodes
    decode: list[tuple[int, Step]] = field(default_factory=list)  # a lease, after so many tokens


class ScriptedLease:
    """A lease at its worker; once committed it decodes a token each turn of the event loop."""

    def __init__(self, session: ScriptedSession, order: LeaseOrder):
        self.session = session
        self.order = order
        self.task: asyncio.Task[None] | None = None

    def commit(self, output: list[int]) -> None:
        self.task = asyncio.create_task(self._decode(output))

    async def _decode(self, output: list[int]) -> None:
        script = self.session.worker.script.decode
        stop, how = script.pop(0) if script else (-1, None)
        fence, request = self.order.lease, self.order.request
        while True:
            await asyncio.sleep(0)
            if stop == 0:
                self._stop(how)
                return
            stop -= 1
            delta = draw(request, output)
            output.extend(delta.tokens)
            self.session.deliver([LeaseEvent(fence.lease, fence.epoch, delta)])
            if delta.finish is not None:
                self.session.leases.pop(fence.lease, None)
                return

    def _stop(self, how: Step) -> None:
        fence = self.order.lease
        if isinstance(how, MillraceError):
            self.session.leases.pop(fence.lease, None)
            self.session.deliver([LeaseEvent(fence.lease, fence.epoch, error=how)])
        elif how == LOSE:
            self.session.worker.lose_sessions()

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()


class ScriptedSession:
    """A decode worker's end of a session (serving.links.DecodeSession)."""

    def __init__(self, worker: ScriptedWorker, deliver: Deliver, lost: Callable[[MillraceError], None]):
        self.worker = worker
        self.deliver = deliver
        self.lost = lost
        self.leases: dict[str, ScriptedLease] = {}
        self.closed = False
        self.over = asyncio.Event()

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        assert order.lease.lease not in self.leases, "a lease was opened twice"
        self.worker.opened[order.lease.lease] += 1
        if order.prefill:
            self.worker.asked_to_prefill.add(order.lease.lease)
        await self.worker.play(self.worker.script.open, self)
        return self._enter(order)

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        old = self.leases.pop(order.lease.lease, None)
        if old is None:
            raise StaleLease("the lease is not open here", code="lease")
        old.stop()
        assert order.lease.epoch > old.order.lease.epoch
        await self.worker.play(self.worker.script.advance, self)
        return self._enter(order)

    def _enter(self, order: LeaseOrder) -> LeaseGrant:
        self.leases[order.lease.lease] = ScriptedLease(self, order)
        return LeaseGrant(lease=order.lease, cached_tokens=0, address=self.worker.status.address, kv_dtype="float32")

    def cancel(self, lease: str) -> None:
        self.worker.cancelled[lease] += 1
        gone = self.leases.pop(lease, None)
        if gone is not None:
            gone.stop()

    async def close(self) -> None:
        self.closed = True
        self.over.set()
        for lease in self.leases.values():
            lease.stop()
        self.leases.clear()


class ScriptedWorker:
    """A worker and its link in one (router.fleet.WorkerLink). `others` are the workers KV can be handed to."""

    def __init__(self, status: WorkerStatus, others: dict[str, ScriptedWorker]):
        self.status = status
        self.others = others
        self.script = Script()
        self.sessions: list[ScriptedSession] = []
        self.opened: Counter[str] = Counter()
        self.asked_to_prefill: set[str] = set()  # leases that were opened with their prefill
        self.cancelled: Counter[str] = Counter()
        self.runs = 0  # prefills in progress
        self.orders: list[PrefillOrder] = []
        self.unreachable: set[str] = set()  # addresses of decode workers that its KV does not get to
        self.audit_error: MillraceError | None = None
        self.link_closed = 0
        self.closing = asyncio.Event()
        others[status.address] = self

    def change(self, **fields: Any) -> WorkerStatus:
        self.status = replace(self.status, **fields)
        return self.status

    def leases(self) -> list[str]:
        return [name for session in self.sessions if not session.closed for name in session.leases]

    def lose_sessions(self) -> None:
        """The connection breaks: what was in it is gone on both sides."""
        for session in self.sessions:
            if not session.closed:
                session.closed = True
                session.over.set()
                for lease in session.leases.values():
                    lease.stop()
                session.leases.clear()
                session.lost(lost())

    async def play(self, steps: list[Step], session: ScriptedSession | None = None) -> Step:
        """The next word of a script: raises what it says, returns it, or waits until link or session are closed."""
        await asyncio.sleep(0)
        step = steps.pop(0) if steps else None
        if isinstance(step, BaseException):
            raise step
        if step == HANG and session is not None:
            await session.over.wait()
            raise lost()
        if step == HANG:
            await self.closing.wait()
            raise asyncio.CancelledError
        return step

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> ScriptedSession:
        await self.play(self.script.connect)
        session = ScriptedSession(self, deliver, lost)
        self.sessions.append(session)
        return session

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        self.orders.append(order)
        self.runs += 1
        try:
            if await self.play(self.script.before_first) == "empty":
                return
            tokens = list(order.order.generated)
            delta = draw(order.order.request, tokens)
            yield Prefilled(delta=delta, cached_tokens=0, queue_seconds=0.0, compute_seconds=0.0)
            if delta.finish is None:
                await self.play(self.script.after_first)
                assert order.grant is not None
                if order.grant.address in self.unreachable:
                    raise StaleLease("the decode worker cannot be reached", code="decode_lost")
                self.others[order.grant.address].lease(order.grant.lease).commit([*tokens, *delta.tokens])
                await self.play(self.script.committed)
        finally:
            self.runs -= 1

    def lease(self, fence: LeaseId) -> ScriptedLease:
        for session in self.sessions:
            lease = session.leases.get(fence.lease)
            if lease is not None and lease.order.lease == fence and lease.task is None:
                return lease
        raise StaleLease("the lease is over", code="lease")

    async def audit(self) -> list[Audit]:
        if self.audit_error is not None:
            raise self.audit_error
        return [Audit(service=self.status.name, counts={"leases": len(self.leases())}, leaked={})]

    async def close(self) -> None:
        """The link's end, as of a gRPC channel: sessions are lost, calls in progress are cancelled."""
        self.link_closed += 1
        self.lose_sessions()
        self.closing.set()


def lost() -> MillraceError:

    return WorkerLost("the connection broke")
