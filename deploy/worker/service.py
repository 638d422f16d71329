"""The gRPC doors of a worker's process. They outlive its worker: after a flip they lead to the next one.

What a call may do is decided by the worker; between two workers every call is told that this one drains.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from decode.service import DecodeService
from deploy.runtime.roles import role_of
from deploy.worker.worker import Worker
from prefill.service import PrefillService
from serving.errors import InvalidRequest
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import answering
from serving.wire import to_pb

Flip = Callable[[Role, float | None], Awaitable[str]]
"""Has the worker serve in that role, giving what it holds so many seconds; the instance of its new life."""


class WorkerService(stubs.WorkerServicer):
    """Serves `Worker`: what every worker answers. Without `flip` it keeps its role."""

    def __init__(self, worker: Worker | None, flip: Flip | None = None):
        self.worker = worker
        self.flip = flip

    async def GetAudit(self, request: pb.AuditRequest, context: object) -> pb.AuditReply:
        audits = [] if self.worker is None else [self.worker.audit_now()]
        return pb.AuditReply(audits=[to_pb(audit, pb.Audit) for audit in audits])

    async def Flip(self, request: pb.FlipRequest, context: object) -> pb.FlipReply:
        async with answering(context):
            if self.flip is None:
                raise InvalidRequest("this worker keeps its role", param="role")
            seconds = request.seconds if request.HasField("seconds") else None
            return pb.FlipReply(instance=await self.flip(role_of(request.role), seconds))


class WorkerDoors:
    """All services of a worker's process, whatever its role: the worker refuses what that does not allow."""

    def __init__(self, flip: Flip):
        self.own = WorkerService(None, flip)
        self.decode = DecodeService(None)
        self.prefill = PrefillService(None)

    def add_to(self, server: Any) -> None:
        stubs.add_WorkerServicer_to_server(self.own, server)
        self.decode.add_to(server)
        stubs.add_PrefillServicer_to_server(self.prefill, server)

    def show(self, worker: Worker) -> None:
        """From now on they lead to this worker."""
        self.own.worker = worker
        self.decode.lead_to(worker.decode, worker.prefill)
        self.prefill.worker = worker.prefill

    def close(self) -> None:
        """They lead nowhere: sessions end once what they have to tell is told."""
        self.own.worker = self.prefill.worker = None
        self.decode.lead_to(None, None)
