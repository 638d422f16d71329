"""One controller at a time on Kubernetes: a Lease of coordination.k8s.io, renewed while its holder lives.

Clocks of two pods may differ, so the time in a Lease is not believed: it has run out once it was seen unchanged for
its whole duration, as in Kubernetes' own controllers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from deploy.autoscaler.actuator import ActuatorError
from deploy.autoscaler.kube_api import CONFLICT, NOT_FOUND, KubeApi, whole_number

log = logging.getLogger(__name__)

LEASE_SECONDS = 60
Write = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class KubeLease:
    """A lock (deploy.autoscaler.lock). `holder` is who we are: a pod's name. Renew it within every LEASE_SECONDS."""

    def __init__(self, api: KubeApi, name: str, holder: str, clock: Callable[[], float] = time.monotonic):
        self.api = api
        self.name = name
        self.holder = holder
        self.clock = clock
        self.path = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"
        self._seen: tuple[str, float] = "", 0.0  # a version of the Lease, and when it was seen first

    async def held(self) -> bool:
        """Take the Lease, or renew it; False while another holds it. Raises ActuatorError."""
        try:
            found = await self.api.get(f"{self.path}/{self.name}")
        except ActuatorError as error:
            if error.code != NOT_FOUND:
                raise
            return await self._write(self.api.create, self.path, self._lease({}))
        if self._left(found) > 0:
            return False
        return await self._write(self.api.replace, f"{self.path}/{self.name}", self._lease(found))

    async def release(self) -> None:
        """Another may take it at once; nothing where it is not ours."""
        try:
            found = await self.api.get(f"{self.path}/{self.name}")
            if found["spec"].get("holderIdentity") == self.holder:
                await self._write(self.api.replace, f"{self.path}/{self.name}", self._lease(found, holder=""))
        except ActuatorError as error:
            log.info("Lease %s runs out by itself: %s", self.name, error.message)

    def _left(self, found: dict[str, Any]) -> float:
        """Seconds that another still holds it, as far as is known; 0 where none does."""
        spec, version = found["spec"], str(found["metadata"].get("resourceVersion", ""))
        if spec.get("holderIdentity") in (None, "", self.holder):
            return 0.0
        if self._seen[0] != version:
            self._seen = version, self.clock()
        duration = whole_number(spec, "leaseDurationSeconds") or LEASE_SECONDS
        return max(0.0, self._seen[1] + duration - self.clock())

    def _lease(self, found: dict[str, Any], holder: str | None = None) -> dict[str, Any]:
        """The Lease as held by us, over what there was."""
        now, before = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), found.get("spec", {})
        ours = before.get("holderIdentity") == self.holder
        spec = {
            "holderIdentity": self.holder if holder is None else holder,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": whole_number(before, "leaseTransitions") + (bool(found) and not ours),
        }
        metadata = found.get("metadata", {"name": self.name, "namespace": self.api.namespace})
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _write(self, write: Write, path: str, lease: Mapping[str, Any]) -> bool:
        """False where another controller was quicker."""
        try:
            await write(path, lease)
        except ActuatorError as error:
            if error.code != CONFLICT:
                raise
            return False
        return True
