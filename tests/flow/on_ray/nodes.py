"""A Ray cluster of several nodes on this host, and what a test asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deploy.on_ray.actors import ActorReport
from tests.flow.server import wait_until

STORE = 80_000_000  # bytes: nothing of ours is in Ray's object store
SECONDS = 120.0


@dataclass
class RayNodes:
    """A cluster, its nodes by what they are for, and what a test asks of it."""

    ray: Any
    cluster: Any
    nodes: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(num_cpus=2, object_store_memory=STORE)

    def report(self, name: str, deployment: str = "tests") -> ActorReport | None:
        """What the actor of this service says; None while it cannot."""
        try:
            found: ActorReport = self.ray.get(self.ray.get_actor(name, namespace=deployment).report.remote(), timeout=5)
        except (ValueError, self.ray.exceptions.RayError, self.ray.exceptions.GetTimeoutError):
            return None
        return found

    def running(self, name: str, deployment: str = "tests") -> ActorReport:
        found: ActorReport = wait_until(
            lambda: (report := self.report(name, deployment)) is not None and report.pid is not None and report,
            SECONDS,
            f"{name} runs",
        )
        return found

    def names(self) -> set[str]:
        return {found["name"] for found in self.ray.util.list_named_actors(all_namespaces=True)}

    def groups(self) -> list[str]:
        """States of the placement groups that are not given back."""
        table = self.ray.util.placement_group_table().values()
        return [group["state"] for group in table if group["state"] != "REMOVED"]
