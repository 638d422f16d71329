"""The router's gRPC door: workers and nodes of the KV pool report here, and are told where the pool is."""

from __future__ import annotations

from grpc import aio

from router.fleet import Fleet
from router.without import lacking_without
from serving.messages import KVEvents, PoolReport, WorkerStatus
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.proto import pool_pb2 as pool
from serving.rpc import answering
from serving.wire import from_pb


class RegistryService(stubs.RegistryServicer):
    """Serves `Registry` for one fleet."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self._let_go: dict[str, float] = {}  # instances that asked and may go, until they have said that they drain

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: aio.ServicerContext) -> pb.HeartbeatReply:
        async with answering(context):
            self.fleet.check_protocol(request.status.name, request.status.protocol)  # before anything else is read
            events = from_pb(request.kv_events, KVEvents) if request.HasField("kv_events") else None
            made_at = request.router_time if request.HasField("router_time") else None
            self.fleet.heartbeat(from_pb(request.status, WorkerStatus), events, made_at=made_at)
        reply = self._reply()
        since = self.fleet.kv_events_since(request.status.instance)
        if since is not None:
            reply.kv_events_since = since
        return reply

    async def PoolHeartbeat(self, request: pool.PoolStat, context: aio.ServicerContext) -> pb.HeartbeatReply:
        async with answering(context):
            self.fleet.pool_heartbeat(from_pb(request, PoolReport))
        return self._reply()

    async def PoolNodes(self, request: pb.PoolNodesRequest, context: aio.ServicerContext) -> pb.HeartbeatReply:
        """Where the pool is, for callers that have nothing to report yet."""
        return self._reply()

    async def Without(self, request: pb.WithoutRequest, context: object) -> pb.WithoutReply:
        """A worker that is not known here serves nobody here. One that is let go counts as gone before it says so."""
        fleet, now = self.fleet, self.fleet.clock()
        known = {each.status.name: each for each in fleet.registry.workers.values()}
        if request.worker not in known:
            return pb.WithoutReply()
        own = known[request.worker].candidate
        self._let_go = {instance: until for instance, until in self._let_go.items() if now < until}
        going = [name for name, each in known.items() if each.status.instance in self._let_go]
        role = lacking_without(fleet.candidates(), own, going)
        if role is None:
            self._let_go[own.instance] = now + fleet.config.silence
        return pb.WithoutReply(role=role or "")

    def _reply(self) -> pb.HeartbeatReply:
        fleet = self.fleet
        return pb.HeartbeatReply(
            router=fleet.config.name,
            pool_nodes=fleet.pool_nodes.nodes(),
            router_time=fleet.clock(),
            workers=len(fleet.registry.workers),
        )
