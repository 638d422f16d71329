"""A router over scripted workers; every test that uses it ends with nothing held anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import make_policy
from router.router import Router
from serving.errors import MillraceError
from serving.messages import Delta, Request, Role
from serving.timeline import Timeline
from tests.fakes.loop_time import passing_time
from tests.fakes.sequences import make_request
from tests.prefill.scripted import written_out
from tests.router.remote import Remote
from tests.router.scripted import ScriptedWorker, make_status

PROMPT = (3, 1, 4)


class Recorder:
    """An observer that remembers (router.router.RouterObserver)."""

    def __init__(self) -> None:
        self.firsts: list[str] = []
        self.replacements: list[MillraceError] = []
        self.endings: list[tuple[str, Timeline, Delta | None, BaseException | None]] = []

    def first_token(self, request: Request, seconds: float, cached: int) -> None:
        self.firsts.append(request.request_id)

    def tokens(self, seconds: float, count: int) -> None: ...

    def replaced(self, error: MillraceError) -> None:
        self.replacements.append(error)

    def finished(self, request: Request, timeline: Timeline, last: Delta | None, error: BaseException | None) -> None:
        self.endings.append((request.request_id, timeline, last, error))


@pytest.fixture
def ties_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal workers are taken in the order of their names, so that a test can say which one a request meets."""
    monkeypatch.setattr("router.policy.spread", lambda demand, worker: worker.status.name)


@pytest.fixture
def looks_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks again when something has changed, and never because a while has passed."""
    monkeypatch.setattr("router.fleet.RECHECK_SECONDS", 1e9)


class World:
    """`add` workers, then `generate`. Time stands still unless `now` is moved; pauses and patience are the loop's."""

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.workers: dict[str, ScriptedWorker] = {}
        self.addresses: dict[str, ScriptedWorker] = {}
        self.fleet = Fleet(
            RouterConfig(**{"patience": 5.0, "retry_pause": 0.0, **config}),
            lambda status: next(w for w in self.workers.values() if w.status.instance == status.instance),
            clock=lambda: self.now,
        )
        self.seen = Recorder()
        self.placer = Placer(self.fleet, make_policy(self.fleet.config.policy))
        self.router = Router(self.placer, self.seen)

    def add(self, name: str, role: Role = Role.MIXED, **fields: Any) -> ScriptedWorker:
        worker = ScriptedWorker(make_status(name, role, **fields), self.addresses)
        self.workers[name] = worker
        self.fleet.heartbeat(worker.status)
        return worker

    def beat(self) -> None:
        for worker in self.workers.values():
            self.fleet.heartbeat(worker.status)

    def let_pass(self, seconds: float) -> None:
        """Time in which the router does its housekeeping, and no worker reports."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.fleet.expire()

    async def tokens(self, request: Request) -> list[int]:
        """All tokens of a request, each at its place."""
        found: list[int] = []
        finish = None
        async for delta in self.router.generate(request):
            assert finish is None and delta.index == len(found), "a token was skipped, repeated, or came too late"
            found += delta.tokens
            finish = delta.finish
        assert finish is not None
        return found

    async def outlasted(self, *requests: Request) -> list[list[int] | BaseException]:
        """How each of them ends, where nothing changes for longer than they are patient."""
        let_pass, waiting = passing_time(), []
        for request in requests:
            waiting.append(asyncio.create_task(self.tokens(request)))
            await self.settled()
        let_pass(self.fleet.config.patience + 1.0)
        return await asyncio.gather(*waiting, return_exceptions=True)

    async def settled(self) -> None:
        """Let what was cancelled come to its end."""
        for _ in range(20):
            await asyncio.sleep(0)

    def held(self) -> dict[str, int]:
        """Everything the router or a worker still holds, by name."""
        entries = self.fleet.registry.workers.values()
        counts = {
            "running": self.router.running,
            "prefills": self.fleet.running_prefills,
            "open_leases": self.fleet.open_leases,
            "waiting": self.placer.admission.waiting + self.placer.prefill_queue.waiting,
            "prefill_only": self.fleet.prefill_only_leases,
            "counted": len(self.fleet._counted),
            "openings": sum(map(len, self.fleet.sessions._openings.values())),
            "kept": len(self.placer.room.kept),
            "explained": len(self.router.explained._running),
            "isolated": self.router.isolation._turn.locked(),
            "expected": self.fleet.prefixes._to_come if self.fleet.prefixes is not None else 0,
            "entry.leases": sum(entry.leases for entry in entries),
            "entry.newer.prompt_tokens": sum(entry.newer.prompt_tokens for entry in entries),
        }
        for name, worker in self.workers.items():
            counts |= {f"{name}.leases": len(worker.leases()), f"{name}.runs": worker.runs}
        return {name: count for name, count in counts.items() if count}

    def check_cancelled_once(self) -> None:
        """Every lease asked for was given back, once for each time, unless its session was lost meanwhile."""
        for worker in self.workers.values():
            for lease, count in worker.opened.items():
                assert worker.cancelled[lease] <= count
                assert worker.cancelled[lease] == count or any(session.closed for session in worker.sessions)
            assert not worker.cancelled - worker.opened, "a lease was cancelled that was never opened"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.settled()
    assert made.held() == {}
    made.check_cancelled_once()
    await made.fleet.close()


@pytest.fixture
def split(world: World) -> World:
    """Two prefill and two decode workers."""
    for number in range(2):
        world.add(f"p{number}", Role.PREFILL)
        world.add(f"d{number}", Role.DECODE)
    return world


def wanted(name: str = "r", max_tokens: int = 8, prompt: Sequence[int] = PROMPT, **fields: Any) -> Request:
    return make_request(prompt, request_id=name, max_tokens=max_tokens, **fields)


def expected(request: Request) -> list[int]:
    return written_out(request.prompt, request.sampling.max_tokens)


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    made = Remote()
    await made.start()
    yield made
    await made.stop()
