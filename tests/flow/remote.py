"""Workers behind real gRPC servers on loopback, in this process: the wire and the services, without the processes."""

from __future__ import annotations

from decode.service import DecodeService
from deploy.local import LocalCluster
from deploy.worker.build import WorkerLinks, build_worker
from deploy.worker.service import WorkerService
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from prefill.service import PrefillService
from router.clients import RemoteWorker
from router.fleet import WorkerLink
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, server

KEY = "cluster-key-of-the-tests"


class RemoteCluster(LocalCluster):
    """A LocalCluster whose router and workers meet only over gRPC, with a cluster key."""

    async def start(self) -> None:
        self.servers = []
        self.dialers = []
        self.workers: list[Worker] = []
        for number, role in enumerate(self.roles):
            await self._serve(role, number)
        self.beat()
        self._start_beating()

    async def _serve(self, role: Role, number: int) -> None:
        grpc_server = server(KEY)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        dialer = Dialer(cluster_key=KEY)
        links = WorkerLinks(address=f"127.0.0.1:{port}", dialer=dialer)
        name = f"{role}-{number}"
        worker = build_worker(role, self.model, self.model_config, self.engine_config, links, name=name)
        stubs.add_WorkerServicer_to_server(WorkerService(worker), grpc_server)
        if worker.decode is not None:
            DecodeService(worker.decode, worker.prefill).add_to(grpc_server)
        stubs.add_PrefillServicer_to_server(PrefillService(worker.prefill), grpc_server)
        worker.start()
        await grpc_server.start()
        self.workers.append(worker)
        self.servers.append(grpc_server)
        self.dialers.append(dialer)

    def _link(self, status: WorkerStatus) -> WorkerLink:
        return RemoteWorker(Caller(status.address, KEY))

    async def stop(self) -> None:
        await super().stop()
        for dialer in self.dialers:
            await dialer.close()
        for grpc_server in self.servers:
            await grpc_server.stop(0)
