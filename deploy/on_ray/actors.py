"""The actors of a deployment: one for each service, which runs it as a child process, and one that keeps its name.

Tokens and KV never pass through an actor: the child has its own gRPC. Classes are named after roles, as Ray's dashboard
shows them.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.on_ray.layout import check_scale
from deploy.on_ray.library import the_ray_library
from deploy.runtime.supervisor import ChildSpec, Supervisor
from serving.log_config import LogConfig
from serving.log_lines import setup_of
from serving.logs import setup_logging

TIED = "deploy.on_ray.tied"
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorReport:
    """What an actor says of its child: `pid` is None where none runs. `left` comes after `leaving`, for good."""

    node: str
    pid: int | None
    leaving: bool
    left: bool


class ServiceActor:
    """Keeps one child process running, on a thread of its own: a child is killed when the thread that began it ends."""

    def __init__(self, name: str, command: Sequence[str], key: str | None, threads: int, logs: LogConfig):
        setup_logging(setup_of(logs, command[0], name), [key] if key else [])
        ray = the_ray_library()
        self.name = name
        self.node: str = ray.get_runtime_context().get_node_id()
        host: str = ray.util.get_node_ip_address()
        own = (str(os.getpid()), *command, "--grpc-host", host, "--threads", str(threads))
        if command[0] == "kvcache":
            own = own[:-2]  # a node of the pool computes nothing
        environ = {"OMP_NUM_THREADS": str(threads)} | ({"MILLRACE_CLUSTER_KEY": key} if key else {})
        self.supervisor = Supervisor([ChildSpec(name=name, arguments=own)], environ, module=TIED)
        self._leaving, self._left = False, False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="child", daemon=True).start()
        self._call(self._start()).result(ANSWER_SECONDS)

    def __repr__(self) -> str:
        return self.name

    def report(self) -> ActorReport:
        process = self.supervisor.processes.get(self.name)
        running = process is not None and process.returncode is None
        pid = process.pid if process is not None and running else None
        return ActorReport(node=self.node, pid=pid, leaving=self._leaving, left=self._left)

    def leave(self, seconds: float) -> None:
        """Have the child drain, and be killed if it has not left in time. `report` tells when it has."""
        if not self._leaving:
            self._leaving = True
            self._call(self._leave(seconds))

    def change(self, kind: str) -> None:
        """What the child is started as, should it die: it has flipped."""
        before, *_ = self.supervisor.children.values()
        parent, _, *rest = before.arguments
        self.supervisor.change(ChildSpec(name=self.name, arguments=(parent, kind, *rest)))

    async def _start(self) -> None:
        self.supervisor.start()

    async def _leave(self, seconds: float) -> None:
        await self.supervisor.stop(seconds)
        self._left = True

    def _call(self, work: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class PrefillActor(ServiceActor):
    """A prefill worker's."""


class DecodeActor(ServiceActor):
    """A decode worker's."""


class MixedActor(ServiceActor):
    """A mixed worker's."""


class KvcacheActor(ServiceActor):
    """A node of the KV pool's."""


ACTORS: Mapping[str, type[ServiceActor]] = {
    "prefill": PrefillActor,
    "decode": DecodeActor,
    "mixed": MixedActor,
    "kvcache": KvcacheActor,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """What the router's process last said: the numbers it keeps to, and the state of every service by its name."""

    counts: Mapping[str, int]
    services: Mapping[str, str]
    scaled: int = 0  # the last command to scale that it has taken


class DeploymentActor:
    """Holds the name of a deployment: `millrace scale` leaves its wishes here, the router's process takes them.

    A wish stays until that process has said that it took it, since an answer of ours may never reach it. It is told
    again of numbers that it keeps to already, which changes nothing.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = groups
        self._deployed: Deployed | None = None
        self._wanted: dict[str, int] = {}
        self._command = time.time_ns()  # an actor that was restarted numbers its commands above those before

    def scale(self, wanted: Mapping[str, int]) -> int:
        """Leave a wish; its number, by which `deployed` tells that it was taken. Raises ValueError for one that cannot
        be granted: of that nothing is kept.
        """
        check_scale(wanted, self.groups)
        self._wanted |= wanted
        self._command += 1
        return self._command

    def exchange(self, deployed: Deployed) -> tuple[int, dict[str, int]]:
        """The router's process tells how things are; the last command's number, and the counts it has not taken yet."""
        self._deployed = deployed
        if deployed.scaled >= self._command:
            self._wanted = {}
        return self._command, dict(self._wanted)

    def deployed(self) -> Deployed | None:
        return self._deployed
