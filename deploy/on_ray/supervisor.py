"""A deployment's services on Ray, for an asyncio program: `start`, `stop`, and a reconciler in between.

It stands in for `deploy.control.below.ChildProcesses`, whose workers are on this host.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from deploy.on_ray.cluster import RayDeployment
from serving.errors import InvalidRequest
from serving.messages import Role

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between looks


class RaySupervisor:
    """Looks after a deployment in a thread, one look at a time."""

    def __init__(self, deployment: RayDeployment):
        self.deployment = deployment
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._reconcile(), name="ray-reconciler")

    async def stop(self, seconds: float) -> None:
        """Have every service drain for so many seconds at most, and leave nothing on the cluster."""
        self._stopping.set()
        try:
            if self._task is not None:
                await self._task
        finally:
            await asyncio.to_thread(self.deployment.stop, seconds)

    # ---- as the control door asks (deploy.control.below) -------------------------------------------------------

    def roles(self) -> dict[str, Role]:
        return {name: Role(kind) for name, kind in self.deployment.kinds.items() if kind in tuple(Role)}

    def leaving(self) -> list[str]:
        return sorted(self.deployment.leaving)

    def add(self, role: Role) -> None:
        kinds = [group.kind for group in self.deployment.layout.groups.values()]
        if role.value not in kinds:
            raise InvalidRequest(
                f"no group of this deployment has {role} workers: flip one of another role, or name such a group in the"
                " placement file",
                param="role",
            )
        self.deployment.wish(lambda layout: layout.add_one(role.value))

    def let_go(self, name: str) -> None:
        if name not in self.roles():
            raise InvalidRequest(
                f"{name} is no worker of this deployment: stop it where it was started", param="worker"
            )
        self.deployment.wish(lambda layout: layout.let_go(name))

    def flipped(self, name: str, role: Role) -> None:
        if name in self.roles():
            self.deployment.flipped(name, role.value)

    async def _reconcile(self) -> None:
        """A look that fails is followed by another, as where the name of an actor that has ended is still taken.

        Ray has errors of its own, and gives Python's for names, groups and connections.
        """
        failures = (self.deployment.ray.exceptions.RayError, ValueError, RuntimeError, OSError)
        while not self._stopping.is_set():
            try:
                await asyncio.to_thread(self.deployment.tick)
            except failures as error:  # workers go on without it
                first, *_ = (*str(error).splitlines(), type(error).__name__)
                log.warning("the Ray cluster could not be looked after, which is tried again: %s", first)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), INTERVAL)
