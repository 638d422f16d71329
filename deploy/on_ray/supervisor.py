"""A deployment's services on Ray, for an asyncio program: `start`, `stop`, and a reconciler in between.

It stands in for `deploy.runtime.supervisor.Supervisor`, whose children are on this host.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from deploy.on_ray.cluster import RayDeployment

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
