"""The control door of a front: gRPC beside the registry, behind the cluster key and certificates of all services.

It translates, and lets nobody change anything beside the one who controls.
"""

from __future__ import annotations

from deploy.control.fleet_control import FleetControl
from deploy.runtime.roles import role_of
from serving.grpc_tls import GrpcTls
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, answering, asking

SLACK_SECONDS = 60.0  # beyond a drain: the worker may load what drafts, and begins anew


class ControlService(stubs.ControlServicer):
    """Serves `Control` for one front."""

    def __init__(self, control: FleetControl):
        self.control = control

    async def Claim(self, request: pb.ControlClaimRequest, context: object) -> pb.ControlReply:
        async with answering(context):
            self.control.claim(request.holder, request.seconds)
        return pb.ControlReply()

    async def Workers(self, request: pb.ControlWorkersRequest, context: object) -> pb.ControlWorkersReply:
        found = [
            pb.ControlWorker(name=each.worker_id, role=each.role, state=each.state) for each in self.control.workers()
        ]
        return pb.ControlWorkersReply(workers=found)

    async def Add(self, request: pb.ControlAddRequest, context: object) -> pb.ControlReply:
        async with answering(context):
            self.control.check_controls(request.holder)
            self.control.add(role_of(request.role))
        return pb.ControlReply()

    async def Drain(self, request: pb.ControlDrainRequest, context: object) -> pb.ControlReply:
        async with answering(context):
            self.control.check_controls(request.holder)
            self.control.drain(request.worker)
        return pb.ControlReply()

    async def Flip(self, request: pb.ControlFlipRequest, context: object) -> pb.FlipReply:
        async with answering(context):
            self.control.check_controls(request.holder)
            seconds = request.flip.seconds if request.flip.HasField("seconds") else None
            instance = await self.control.flip(request.worker, role_of(request.flip.role), seconds)
        return pb.FlipReply(instance=instance)


async def flip_over(caller: Caller, role: Role, seconds: float | None, bound: float) -> str:
    """Ask the worker there to flip; it drains for `bound` seconds at most. Raises MillraceError."""
    request = pb.FlipRequest(role=role.value, seconds=seconds)
    with asking(caller.address):
        reply = await stubs.WorkerStub(caller.channel).Flip(
            request, metadata=caller.metadata, timeout=bound + SLACK_SECONDS
        )
    instance: str = reply.instance
    return instance


class FlipCalls:
    """Calls to workers' own doors, each over a channel of its own (deploy.control.fleet_control.Flip)."""

    def __init__(self, key: str | None, tls: GrpcTls | None, drain_seconds: float):
        self.key, self.tls, self.drain_seconds = key, tls, drain_seconds

    async def __call__(self, status: WorkerStatus, role: Role, seconds: float | None) -> str:
        caller = Caller(status.address, self.key, self.tls)
        try:
            return await flip_over(caller, role, seconds, self.drain_seconds)
        finally:
            await caller.close()
