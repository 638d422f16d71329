"""The actuator over a router's control door: for child processes of `millrace serve`, and for a deployment on Ray.

The door knows which of the two it is. Here is only the way there: one channel, the cluster key, and who controls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import get_args

from deploy.autoscaler.actuator import ActuatorError, FleetWorker, WorkerState
from serving.errors import MillraceError, Unauthorized, WorkerLost
from serving.grpc_tls import GrpcTls
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
HELD = "held"  # the code of a refused claim (deploy.control.fleet_control)
FLIP_SECONDS = 3600.0  # it drains first: the worker's own bounds come before
CLAIM_SECONDS = 60.0  # a controller that has died is replaced after so long, unless it looks more seldom


class RouterActuator:
    """An Actuator, and the lock of who uses it (deploy.autoscaler.lock). `holder` names this controller; `close` it.

    `flip` returns once the worker serves in its new role, or drains for longer than `patience` seconds: where it fails
    then, `workers` raises what it failed with, once.
    """

    def __init__(
        self,
        address: str,
        cluster_key: str | None,
        holder: str,
        tls: GrpcTls | None = None,
        *,
        patience: float = 10.0,
        claim: float = CLAIM_SECONDS,
    ):
        self.address = address
        self.holder = holder
        self.patience = patience
        self.claim = claim
        self._flips: set[asyncio.Task[None]] = set()  # that are under way, or have failed and nobody was told of it
        self._cluster_key, self._tls = cluster_key, tls

    async def held(self) -> bool:
        """Be the one controller for `claim` seconds from now on; False while another one is. Raises ActuatorError."""
        try:
            await self._claim(self.claim)
        except ActuatorError as error:
            if error.code != HELD:
                raise
            return False
        return True

    async def release(self) -> None:
        """Another may control from now on."""
        try:
            await self._claim(0.0)
        except ActuatorError as error:
            log.info("the claim runs out by itself: %s", error.message)

    async def workers(self) -> Sequence[FleetWorker]:
        for flip in [each for each in self._flips if each.done()]:
            self._flips.remove(flip)
            if (error := flip.exception()) is not None:
                log.error("%s failed: %s", flip.get_name(), error)
                raise error
        with self._asking():
            reply = await self._stub.Workers(
                pb.ControlWorkersRequest(), metadata=self.caller.metadata, timeout=CALL_SECONDS
            )
        return [FleetWorker(each.name, Role(each.role), _state(each.state)) for each in reply.workers]

    async def add(self, role: Role) -> None:
        request = pb.ControlAddRequest(role=role.value, holder=self.holder)
        with self._asking():
            await self._stub.Add(request, metadata=self.caller.metadata, timeout=CALL_SECONDS)

    async def drain(self, worker_id: str) -> None:
        request = pb.ControlDrainRequest(worker=worker_id, holder=self.holder)
        with self._asking():
            await self._stub.Drain(request, metadata=self.caller.metadata, timeout=CALL_SECONDS)

    async def flip(self, worker_id: str, role: Role) -> None:
        flip = asyncio.create_task(self._flip(worker_id, role), name=f"flip-{worker_id}")
        self._flips.add(flip)
        done, _ = await asyncio.wait([flip], timeout=self.patience)
        if done:
            self._flips.remove(flip)
            flip.result()
        else:
            log.info("%s still drains, to serve as %s", worker_id, role)

    async def close(self) -> None:
        for flip in list(self._flips):  # the worker goes on with it
            flip.cancel()
        await asyncio.gather(*self._flips, return_exceptions=True)
        await self.caller.close()

    async def _flip(self, worker_id: str, role: Role) -> None:
        request = pb.ControlFlipRequest(worker=worker_id, flip=pb.FlipRequest(role=role.value), holder=self.holder)
        with self._asking():
            await self._stub.Flip(request, metadata=self.caller.metadata, timeout=FLIP_SECONDS)

    async def _claim(self, seconds: float) -> None:
        request = pb.ControlClaimRequest(holder=self.holder, seconds=seconds)
        with self._asking():
            await self._stub.Claim(request, metadata=self.caller.metadata, timeout=CALL_SECONDS)

    @cached_property
    def caller(self) -> Caller:
        """Made on the event loop that asks first."""
        return Caller(self.address, self._cluster_key, self._tls)

    @property
    def _stub(self) -> stubs.ControlStub:
        return stubs.ControlStub(self.caller.channel)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Every failure as an ActuatorError that says what to do."""
        try:
            with asking(self.address):
                yield
        except Unauthorized as error:
            told = f"the router at {self.address} refuses the cluster key: set MILLRACE_CLUSTER_KEY to the one it has"
            raise ActuatorError(told, code="key") from error
        except WorkerLost as error:
            told = f"no answer from the router ({error.message}): is its gRPC there, and of this version?"
            raise ActuatorError(told, code=error.code) from error
        except MillraceError as error:
            raise ActuatorError(error.message, code=error.code, retry_after=error.retry_after) from error


def _state(word: str) -> WorkerState:
    """A state of a later version is one in which the worker cannot be counted on."""
    for state in get_args(WorkerState):
        if state == word:
            found: WorkerState = state
            return found
    return "starting"
