"""The actuator on Kubernetes: replicas of the chart's Deployments, by their scale subresource.

A pod keeps its role, since its Deployment, labels and network policies are those of that role: in place of a flip a
worker of the one role is added and one of the other drains. Who reports, and as what, the router's control door tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.autoscaler.actuator import ActuatorError, FleetWorker
from deploy.autoscaler.by_router import RouterActuator
from deploy.autoscaler.kube_api import CONFLICT, NOT_FOUND, KubeApi, whole_number
from serving.messages import Role

TRIES = 5  # of a change that another one has come before
FIRST_TO_GO = "-1000"  # the deletion cost of a pod that is to leave; others have 0
COST = "controller.kubernetes.io/pod-deletion-cost"
KEPT = "kept"  # the code of a refused flip


class KubernetesActuator:
    """An Actuator. `deployments` names the Deployment of each role that may be scaled; `close` it."""

    def __init__(self, api: KubeApi, deployments: Mapping[Role, str], router: RouterActuator):
        self.api = api
        self.deployments = dict(deployments)
        self.router = router

    async def workers(self) -> Sequence[FleetWorker]:
        """Pods that report, and those that their Deployments wait for, which have no name yet."""
        found = [each for each in await self.router.workers() if self._deployment_of(each.worker_id) is not None]
        staying = Counter(each.role for each in found if each.state != "draining")
        missing = []
        for role, name in self.deployments.items():
            wanted = _replicas(await self.api.get(self._scale(name)))
            missing += [FleetWorker(f"{name}-?{n}", role, "starting") for n in range(wanted - staying[role])]
        return [*found, *missing]

    async def add(self, role: Role) -> None:
        if role not in self.deployments:
            named = ", ".join(self.deployments)
            raise ActuatorError(f"the release has no Deployment of {role} workers to scale; it has {named}")
        await self._change(self.deployments[role], 1)

    async def drain(self, worker_id: str) -> None:
        """The pod is marked as the first to go; its Deployment then has one replica less."""
        name = self._deployment_of(worker_id)
        if name is None:
            raise ActuatorError(f"{worker_id} is no pod of {', '.join(self.deployments.values())}: scale what it is of")
        await self._mark(worker_id, name)
        await self._change(name, -1)

    async def flip(self, worker_id: str, role: Role) -> None:
        raise ActuatorError(
            f"{worker_id} keeps its role, which is that of its Deployment: add a {role} worker and drain this one",
            code=KEPT,
        )

    async def close(self) -> None:
        await self.router.close()

    def _deployment_of(self, pod: str) -> str | None:
        """A pod is called after its ReplicaSet, and that after the Deployment."""
        return next((name for name in self.deployments.values() if pod.rsplit("-", 2)[0] == name), None)

    def _scale(self, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self.api.namespace}/deployments/{name}/scale"

    async def _mark(self, pod: str, name: str) -> None:
        """A mark may be left of a drain that failed half-way: it counts while the Deployment has pods to take away.

        Raises ActuatorError for a pod that has gone.
        """
        path = f"/api/v1/namespaces/{self.api.namespace}/pods/{pod}"
        found = await self.api.get(path)
        if found["metadata"].get("deletionTimestamp"):
            raise ActuatorError(f"{pod} leaves already")
        if _mark_of(found) == FIRST_TO_GO:
            scale = await self.api.get(self._scale(name))
            if _pods(scale) > _replicas(scale):
                raise ActuatorError(f"{pod} was told to drain before: it is the first that its Deployment takes away")
            return
        await self.api.patch(path, {"metadata": {"annotations": {COST: FIRST_TO_GO}}})

    async def _change(self, name: str, by: int) -> None:
        """One replica more or less than there are, whoever else changes them at the same time."""
        path = self._scale(name)
        for _ in range(TRIES):
            try:
                found = await self.api.get(path)
                replicas = _replicas(found) + by
                if replicas < 1:
                    raise ActuatorError(f"Deployment {name} has one replica: without it nobody would have its role")
                version = found["metadata"].get("resourceVersion")
                await self.api.patch(path, {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}})
                return
            except ActuatorError as error:
                if error.code == NOT_FOUND:
                    raise ActuatorError(f"there is no Deployment {name} in namespace {self.api.namespace}") from error
                if error.code != CONFLICT:
                    raise
        raise ActuatorError(f"Deployment {name} was changed by others {TRIES} times in a row: who else scales it?")


def _mark_of(pod: Mapping[str, Any]) -> object:
    """Its deletion cost; None: it has none."""
    annotations = pod["metadata"].get("annotations")
    return annotations.get(COST) if isinstance(annotations, dict) else None


def _replicas(scale: Mapping[str, Any]) -> int:
    """How many are wanted."""
    return whole_number(scale["spec"], "replicas")


def _pods(scale: Mapping[str, Any]) -> int:
    """How many there are, those that leave already not among them."""
    return whole_number(scale["status"], "replicas")
