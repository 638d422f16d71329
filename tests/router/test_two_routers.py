"""Two routers over the same workers, in whatever order things happen: each worker's own count decides, and no router
knows of the other. The workers are real, but for the model.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.worker import RouterSession
from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import make_policy
from router.router import Router
from serving.errors import MillraceError, WorkerLost
from serving.links import Deliver
from serving.messages import Audit, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder, Request, Role, WorkerStatus
from tests.decode.workers import Worker
from tests.router.conftest import Recorder, expected, wanted

SEQS = 3
SILENCE = 5.0


class Way:
    """A router's way to a worker (router.fleet.WorkerLink). Cut, it carries nothing more: its router is dead."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.sessions: list[WaySession] = []
        self.cut_off = False

    def check(self) -> None:
        if self.cut_off:
            raise WorkerLost("the way is cut")

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> WaySession:
        self.check()
        session = await self.worker.decode.connect(router, deliver, lost)
        self.sessions.append(WaySession(self, session))
        return self.sessions[-1]

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        self.check()
        async with aclosing(self.worker.prefill.run(order)) as results:
            async for prefilled in results:
                yield prefilled

    async def audit(self) -> list[Audit]:
        return await self.worker.worker.audit()

    async def close(self) -> None:
        """The worker goes on."""

    def names(self) -> set[str]:
        return {session.inner.name for session in self.sessions}

    async def cut(self) -> None:
        """What the worker sees of a router that dies: its streams end."""
        self.cut_off = True
        for session in self.sessions:
            await session.inner.close()


class WaySession:
    """A session over a way that may be cut (serving.links.DecodeSession)."""

    def __init__(self, way: Way, inner: RouterSession):
        self.way = way
        self.inner = inner

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        await asyncio.sleep(0)
        self.way.check()
        return await self.inner.open(order)

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        await asyncio.sleep(0)
        self.way.check()
        return await self.inner.advance(order)

    def cancel(self, lease: str) -> None:
        if not self.way.cut_off:
            self.inner.cancel(lease)

    async def close(self) -> None:
        if not self.way.cut_off:
            await self.inner.close()


class OneRouter:
    """A router, the clock it reads, its ways to the workers, and the requests it was given."""

    def __init__(self, workers: dict[str, Worker], clock: Callable[[], float], policy: str):
        self.clock = clock
        self.ways = {instance: Way(worker) for instance, worker in workers.items()}
        config = RouterConfig(patience=60.0, max_failures=100, silence=SILENCE, policy=policy)
        self.fleet = Fleet(config, lambda status: self.ways[status.instance], clock=clock)
        self.router = Router(Placer(self.fleet, make_policy(policy)), Recorder())
        self.asked: list[tuple[Request, asyncio.Task[list[int]]]] = []

    def ask(self, request: Request) -> None:
        self.asked.append((request, asyncio.create_task(self._tokens(request))))

    async def _tokens(self, request: Request) -> list[int]:
        return [token async for delta in self.router.generate(request) for token in delta.tokens]

    @property
    def done(self) -> bool:
        return all(task.done() for _, task in self.asked)

    async def die(self) -> None:
        """As by kill -9: nothing it would still do reaches a worker. Its leases go, and no others."""
        for way in self.ways.values():
            table, own = way.worker.decode.table, way.names()
            theirs = [lease for lease in table.leases.values() if lease.session not in own]
            await way.cut()
            assert list(table.leases.values()) == theirs
        for _, task in self.asked:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.asked), return_exceptions=True)
        await self.fleet.close()

    def leftover(self) -> dict[str, float]:
        entries = self.fleet.registry.workers.values()
        counts = {
            "running": self.router.running,
            "open_leases": self.fleet.open_leases,
            "prefills": self.fleet.running_prefills,
            "entry.leases": sum(entry.leases for entry in entries),
            "newer.leases": sum(entry.newer.leases for entry in entries),
            "newer.prompts": sum(entry.newer.prompt_tokens for entry in entries),
        }
        return {name: number for name, number in counts.items() if number}


@dataclass
class Late:
    """A heartbeat on its way: what the worker said, and the router's time that it echoes."""

    router: OneRouter
    status: WorkerStatus
    made_at: float


@dataclass
class Shared:
    """Workers, the routers over them, and heartbeats that come when they come. Time passes when told."""

    policy: str
    choice: random.Random
    workers: dict[str, Worker] = field(default_factory=dict)
    routers: list[OneRouter] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    now: float = 1000.0
    numbers: count[int] = field(default_factory=count)
    most: int = 0  # leases a worker was seen to hold
    refused: int = 0

    def add_worker(self, blocks: int) -> None:
        made = Worker(Role.MIXED, blocks=blocks, seqs=SEQS, number=len(self.workers) + 1)
        self.workers[made.identity.instance] = made

    def add_router(self) -> OneRouter:
        """With a clock of its own, and it knows no worker yet."""
        ahead = self.choice.uniform(-500.0, 500.0)
        self.routers.append(OneRouter(self.workers, lambda: self.now + ahead, self.policy))
        return self.routers[-1]

    def beat(self, router: OneRouter) -> None:
        """Every worker makes a status for it; they come in order, later."""
        self.late += [Late(router, each.worker.status(), router.clock()) for each in self.workers.values()]

    def hear(self) -> None:
        """The oldest heartbeat on its way arrives."""
        if self.late:
            heard = self.late.pop(0)
            if heard.router in self.routers:
                heard.router.fleet.heartbeat(heard.status, made_at=heard.made_at)

    def ask(self, router: OneRouter) -> None:
        name, prompt = f"r{next(self.numbers)}", self.choice.choices(range(5), k=self.choice.randrange(1, 12))
        router.ask(wanted(name, max_tokens=self.choice.randrange(1, 12), prompt=prompt))

    def running(self) -> list[asyncio.Task[list[int]]]:
        return [task for router in self.routers for _, task in router.asked if not task.done()]

    async def step(self) -> None:
        """Every worker computes a step, and what comes of it gets about."""
        for worker in self.workers.values():
            worker.step()
            self.check(worker)
        for _ in range(3):
            await asyncio.sleep(0)

    def check(self, worker: Worker) -> None:
        """What a worker has granted it has room for, and all it holds is somebody's."""
        held = len(worker.decode.table.leases)
        self.most = max(self.most, held)
        assert held <= SEQS, f"{worker.identity.name} has granted {held} leases, and has room for {SEQS}"
        assert not any(worker.worker.audit_now().leaked.values())

    async def finish(self) -> None:
        """Everything asked of the routers that live ends as if nothing had happened."""
        for turn in range(3000):
            if all(router.done for router in self.routers):
                break
            if turn % 5 == 0:
                self.now += 0.1
                for router in self.routers:
                    self.beat(router)
            while self.late:
                self.hear()
            await self.step()
        self.now += 1.0
        for router in self.routers:
            self.beat(router)
        while self.late:
            self.hear()
        for router in self.routers:
            for request, task in router.asked:
                assert task.done(), f"{request.request_id} waits for ever"
                assert task.cancelled() or task.result() == expected(request)
            assert router.leftover() == {}
        for worker in self.workers.values():
            assert worker.idle(), worker.worker.audit_now()
            self.refused += sum(worker.decode.room.not_granted.values())

    async def close(self) -> None:
        for router in self.routers:
            await router.fleet.close()
        assert not any(worker.decode.sessions for worker in self.workers.values()), "a session has outlived its router"


async def play(shared: Shared, turns: int, *, deaths: bool) -> None:
    """Random things in random order: requests, steps, heartbeats made and heard, time, and the deaths of routers."""
    choice = shared.choice
    for _ in range(turns):
        match choice.randrange(10):
            case 0 | 1 | 2:
                shared.ask(choice.choice(shared.routers))
            case 3 | 4:
                shared.beat(choice.choice(shared.routers))
            case 5 | 6:
                shared.hear()
            case 7:
                shared.now += choice.choice([0.01, 0.2, 1.0])
            case 8 if shared.running() and choice.random() < 0.3:
                choice.choice(shared.running()).cancel()  # a client leaves
            case 9 if deaths and choice.random() < 0.3:
                await shared.routers.pop(choice.randrange(2)).die()
                shared.beat(shared.add_router())
            case _:
                await shared.step()
    await shared.finish()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    blocks=st.sampled_from([8, 12, 32]),
    policy=st.sampled_from(["least_loaded", "goodput"]),
    deaths=st.booleans(),
)
def test_no_worker_grants_more_than_it_has_room_for_and_nothing_leaks(
    seed: int, workers: int, blocks: int, policy: str, deaths: bool
) -> None:
    async def run() -> None:
        shared = Shared(policy, random.Random(seed))
        for _ in range(workers):
            shared.add_worker(blocks)
        for _ in range(2):
            shared.beat(shared.add_router())
        await play(shared, 80, deaths=deaths)
        await shared.close()

    asyncio.run(run())


async def test_two_routers_meet_at_a_full_worker_and_both_get_through() -> None:
    """The test above is worth something: leases are refused in it, and the worker's places are all used."""
    shared = Shared("least_loaded", random.Random(7))
    shared.add_worker(32)
    for _ in range(2):
        shared.beat(shared.add_router())
    while shared.late:
        shared.hear()
    for router in shared.routers:
        for _ in range(2 * SEQS):
            shared.ask(router)
    await shared.finish()
    await shared.close()
    assert shared.refused > 0 and shared.most == SEQS


async def test_a_router_that_comes_late_gets_its_share_of_full_workers() -> None:
    """Whoever has many requests waiting knows first of every place that one of its own leaves."""
    shared = Shared("least_loaded", random.Random(7))
    for _ in range(2):
        shared.add_worker(32)
    busy, late = shared.add_router(), shared.add_router()
    for router in (busy, late):
        shared.beat(router)
    for _ in range(80):
        busy.ask(wanted(f"busy-{next(shared.numbers)}", max_tokens=10))
    for turn in range(400):
        if turn == 40:
            for _ in range(4):
                late.ask(wanted(f"late-{next(shared.numbers)}", max_tokens=10))
        for _ in range(50):  # what was told gets about before anything else happens
            await asyncio.sleep(0)
        if turn % 20 == 0:
            shared.now += 0.2
            for router in shared.routers:
                shared.beat(router)
        while shared.late:
            shared.hear()
        await shared.step()
        if late.asked and late.done:
            break
    waiting = sum(not task.done() for _, task in busy.asked)
    assert late.asked and late.done and waiting > 20, f"{waiting} of the other's requests were left"
    await shared.finish()
    await shared.close()
