"""What may be done to the workers of a router, and by whom: one controller at a time, and one flip.

It refuses what would leave requests without a worker. How workers are started is not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from deploy.autoscaler.actuator import FleetWorker, WorkerState
from deploy.control.below import Below
from router.fleet import Fleet
from router.registry import RegisteredWorker
from router.without import lacking_without
from serving.errors import InvalidRequest, MillraceError, NotFound, Unavailable
from serving.messages import Role, WorkerStatus

log = logging.getLogger(__name__)

HELD = "held"  # the code of a refused claim, and of what one who has none asks for
BUSY = "flipping"  # of a refused flip: another one is under way
LAST = "last"  # of one that would leave nobody in the worker's role
LONGEST_CLAIM = 86_400.0  # seconds: the next controller gets its turn, however the one before it has ended

Flip = Callable[[WorkerStatus, Role, float | None], Awaitable[str]]
"""Has a worker flip, over the wire; the instance of its new life. Raises MillraceError."""


class FleetControl:
    """`below` are the workers that this front keeps running; others, which report as well, may be flipped alone."""

    def __init__(self, fleet: Fleet, below: Below, flip: Flip):
        self.fleet = fleet
        self.below = below
        self._flip = flip
        self._flipping: tuple[str, Role] | None = None
        self._under_way: asyncio.Task[str] | None = None
        self._holder = ""
        self._held_until = 0.0

    def claim(self, holder: str, seconds: float) -> None:
        """`holder` is the one controller for so long. Raises Unavailable while another is, InvalidRequest."""
        if not 0 <= seconds <= LONGEST_CLAIM:  # nor NaN
            raise InvalidRequest(f"a claim of {seconds:g} s: it lasts 0 to {LONGEST_CLAIM:g} s", param="seconds")
        if not holder:  # whoever says no name would have it too
            raise InvalidRequest("a claim of nobody: say who controls", param="holder")
        self.check_controls(holder)
        self._holder, self._held_until = holder, self.fleet.clock() + seconds

    def check_controls(self, holder: str) -> None:
        """Raises Unavailable while another is the one controller; without a claim anybody may control."""
        left = self._held_until - self.fleet.clock()
        if self._holder != holder and left > 0:
            raise Unavailable(
                f"{self._holder} controls these workers, for {left:.0f} s more at least: stop it first",
                code=HELD,
                retry_after=left,
            )

    def workers(self) -> list[FleetWorker]:
        """Those that report, and those that are kept running here and do not yet."""
        below, leaving = self.below.roles(), self.below.leaving()
        found: dict[str, FleetWorker] = {name: FleetWorker(name, role, "starting") for name, role in below.items()}
        for worker in self.fleet.registry.workers.values():
            name, gone = worker.status.name, worker.suspect and worker.status.draining
            if not gone or name in below:
                found[name] = FleetWorker(name, worker.status.role, _state(worker))
        return [
            FleetWorker(name, worker.role, "draining") if name in leaving else worker for name, worker in found.items()
        ]

    def add(self, role: Role) -> None:
        """Raises Unavailable, InvalidRequest."""
        self.below.add(role)

    def drain(self, name: str) -> None:
        """Have it leave. Raises NotFound, Unavailable, InvalidRequest."""
        if name in self.below.leaving():
            return
        self._check_not_last(name)
        self.below.let_go(name)

    async def flip(self, name: str, role: Role, seconds: float | None = None) -> str:
        """The instance of its new life, once it serves in the role. Raises NotFound, InvalidRequest, Unavailable."""
        if self._flipping is not None:
            other, wanted = self._flipping
            raise Unavailable(f"{other} flips to {wanted}: wait until it serves", code=BUSY, retry_after=1.0)
        worker = self._known(name)
        if worker.status.role is role:
            return worker.status.instance
        self._check_not_last(name)
        self._flipping = name, role
        self._under_way = asyncio.create_task(self._see_through(worker.status, role, seconds), name=f"flip-{name}")
        self._under_way.add_done_callback(_noted)
        return await asyncio.shield(self._under_way)  # the worker goes on with it if who asked has left

    async def _see_through(self, worker: WorkerStatus, role: Role, seconds: float | None) -> str:
        name = worker.name
        try:
            instance = await self._flip(worker, role, seconds)
        except (InvalidRequest, Unavailable):
            raise  # in the worker's own words
        except MillraceError as error:
            raise Unavailable(f"{name} did not flip to {role}: {error.message}", code=error.code) from error
        finally:
            self._flipping = None
        self.below.flipped(name, role)
        return instance

    def _known(self, name: str) -> RegisteredWorker:
        found = [each for each in self.fleet.registry.workers.values() if each.status.name == name]
        if not found:
            raise NotFound(f"no worker {name!r} reports here; there are {', '.join(self._names()) or 'none'}")
        return found[-1]

    def _names(self) -> Sequence[str]:
        return sorted({each.status.name for each in self.fleet.registry.workers.values()})

    def _check_not_last(self, name: str) -> None:
        """Raises Unavailable if the others could not serve without it."""
        if name in self.below.roles() and name not in self._names():
            return  # it does not serve yet
        own = self._known(name).candidate
        going = set(self.below.leaving())  # they may not have said so yet
        if self._flipping is not None:
            going.add(self._flipping[0])
        role = lacking_without(self.fleet.candidates(), own, going)
        if role is not None:
            told = f"{name} stays {own.status.role}: without it no worker would {role}"
            raise Unavailable(f"{told}; add a {role} or mixed worker first", code=LAST)


def _noted(flip: asyncio.Task[str]) -> None:
    """Who asked may have left; why a flip failed is then in the log alone."""
    if not flip.cancelled() and (error := flip.exception()) is not None:
        log.info("%s: %s", flip.get_name(), error)


def _state(worker: RegisteredWorker) -> WorkerState:
    if worker.status.draining:
        return "draining"
    return "starting" if worker.suspect else "ready"
