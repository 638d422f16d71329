"""The router's gRPC door: workers report here."""

from __future__ import annotations

from grpc import aio

from router.fleet import Fleet
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import answering
from serving.wire import status_from_pb


class RegistryService(stubs.RegistryServicer):
    """Serves `Registry` for one fleet."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet

    async def Heartbeat(self, request: pb.WorkerStatus, context: aio.ServicerContext) -> pb.HeartbeatReply:
        async with answering(context):
            self.fleet.heartbeat(status_from_pb(request))
        return pb.HeartbeatReply(router=self.fleet.config.name)
