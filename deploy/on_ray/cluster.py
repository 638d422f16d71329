"""What a deployment has on a Ray cluster: its placement groups and actors, made, looked after and taken away.

Every call here may wait for Ray: it is for a thread, and for one at a time. Ray restarts actors itself, and moves
bundles of lost nodes; what it has given up (a removed group, an actor that is dead for good) is made anew here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from deploy.on_ray.actors import ACTORS, ActorReport, Deployed, DeploymentActor
from deploy.on_ray.layout import BundleSet, RayLayout, RayService
from deploy.on_ray.library import own_niceness
from serving.log_config import LogConfig

log = logging.getLogger(__name__)

DEPLOYMENT = "deployment"  # the name of the actor that holds a deployment's name
CALL_SECONDS = 5.0
PATIENCE = 10.0  # seconds without room after which the log says so
SLACK = 10.0  # seconds beyond those of a drain in which a child is killed and its end reported


class WatchedActor:
    """The actor of one service, and the question to it that is not answered yet."""

    def __init__(self, ray: Any, service: RayService, handle: Any):
        self.ray = ray
        self.service = service
        self.handle = handle
        self.report: ActorReport | None = None
        self.dead = False
        self._asked: Any = None

    def look(self) -> None:
        """Take the answer if it has come, and ask again. An actor that Ray restarts has nothing to report."""
        errors = self.ray.exceptions
        if self._asked is not None:
            ready, _ = self.ray.wait([self._asked], timeout=0)
            if not ready:
                return
            asked, self._asked = self._asked, None
            try:
                self.report = self.ray.get(asked)
            except errors.ActorUnavailableError:
                self.report = None
            except errors.RayActorError as error:
                log.warning("the actor of %s is dead: %s", self.service.name, str(error).splitlines()[0])
                self.report, self.dead = None, True
                return
        self._asked = self.handle.report.remote()

    def leave(self, seconds: float) -> None:
        """An actor that came back since has a child that knows nothing of it: it is told again."""
        if self.report is not None and not self.report.leaving:
            self.handle.leave.remote(seconds)

    @property
    def state(self) -> str:
        if self.report is None:
            return "waiting"
        return "running" if self.report.pid is not None else "starting"


class PlacedSet:
    """The placement group of a set, and since when it has had no room. One made anew is told of anew."""

    def __init__(self, group: Any):
        self.group = group
        self._since: float | None = None
        self._told = False

    def fits(self) -> None:
        self._since, self._told = None, False

    def waits(self, now: float) -> bool:
        """True once, when it has waited for long."""
        self._since = now if self._since is None else self._since
        told, self._told = self._told, now - self._since > PATIENCE
        return self._told and not told


class RayDeployment:
    """`tick()` every second or so; `stop()` at the end. `ray` is the connected library."""

    def __init__(
        self, ray: Any, layout: RayLayout, strategy: str, router: str, key: str | None, drain: float, logs: LogConfig
    ):
        self.ray = ray
        self.layout = layout
        self.strategy = strategy
        self.router = router
        self.key = key
        self.drain = drain
        self.logs = logs
        self.actors: dict[str, WatchedActor] = {}
        self._placed: dict[int, PlacedSet] = {}  # by the number of the set
        self._given_up: list[Any] = []  # groups of sets that have nobody any more, and that Ray still keeps
        self._scaled = 0  # the last command to scale that was taken
        self._wishes: deque[Callable[[RayLayout], None]] = deque()
        self.kinds, self.leaving = layout.kinds(), frozenset(layout.leaving)  # as of the last look
        self._holder = claim(ray, tuple(layout.groups))

    def tick(self) -> None:
        """Bring what is there nearer to what is wanted. Raises Ray's errors while the cluster does not answer."""
        self._take_wishes()
        self.kinds, self.leaving = self.layout.kinds(), frozenset(self.layout.leaving)
        for name in sorted(self.layout.leaving):
            self._let_go(name)
        self._give_back()
        for one in self.layout.sets:
            self._keep_group(one)
        for one, index, service in self.layout.services():
            actor = self.actors.get(service.name)
            if service.name in self.layout.leaving:
                continue  # nobody is begun to leave
            if actor is None or actor.dead:
                self.actors[service.name] = self._begin(one, index, service)
            else:
                actor.look()

    def stop(self, seconds: float) -> None:
        """Children drain, actors end, placement groups are given back."""
        deadline = time.monotonic() + seconds + SLACK
        staying = dict(self.actors)
        while staying and time.monotonic() < deadline:
            for name, actor in list(staying.items()):
                actor.leave(seconds)
                actor.look()
                if actor.dead or actor.report is None or actor.report.left:
                    del staying[name]  # one without an answer has no child that could drain: it is being moved
            time.sleep(0.05)
        for actor in self.actors.values():
            self.ray.kill(actor.handle, no_restart=True)
        self._given_up += [placed.group for placed in self._placed.values()]
        self._give_back()
        self.ray.kill(self._holder, no_restart=True)

    # ---- groups and actors ---------------------------------------------------------------------------------------

    def _keep_group(self, one: BundleSet) -> None:
        placed = self._placed.get(one.number)
        if placed is None:
            self._placed[one.number] = PlacedSet(self._group(one))
            return
        found = self.ray.util.placement_group_table(placed.group).get("state")
        if found == "REMOVED":
            log.warning("the placement group of set %d is gone: it is made anew", one.number)
            for _, service in one.seated():
                actor = self.actors.pop(service.name, None)
                if actor is not None:  # Ray would go on restarting it where there is no place
                    self.ray.kill(actor.handle, no_restart=True)
            self._placed[one.number] = PlacedSet(self._group(one))
        elif found == "CREATED":
            placed.fits()
        elif placed.waits(time.monotonic()):
            needs = ", ".join(f"{bundle.group.name} {dict(bundle.group.bundle)}" for bundle in one.bundles)
            log.warning("set %d waits for room on the Ray cluster (%s): %s", one.number, self.strategy, needs)

    def _group(self, one: BundleSet) -> Any:
        bundles = [dict(bundle.group.bundle) for bundle in one.bundles]
        return self.ray.util.placement_group(bundles, strategy=self.strategy, name=f"set-{one.number}")

    def _begin(self, one: BundleSet, index: int, service: RayService) -> WatchedActor:
        own = dict(service.group.bundle)
        scheduling = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placed[one.number].group, placement_group_bundle_index=index
        )
        remote = self.ray.remote(ACTORS[service.group.kind]).options(
            name=service.name,
            num_cpus=own.pop("CPU"),
            num_gpus=own.pop("GPU", 0),
            memory=own.pop("memory", None),
            resources=own,
            max_restarts=-1,
            scheduling_strategy=scheduling,
            runtime_env=own_niceness(),
        )
        kind = self.layout.flipped.get(service.name, service.group.kind)
        command = (kind, *service.command[1:], "--routers", self.router)
        try:
            handle = remote.remote(service.name, command, self.key, service.group.threads, self.logs)
        except ValueError:
            self._free(service.name)
            raise
        return WatchedActor(self.ray, service, handle)

    def _free(self, name: str) -> None:
        """End who has the name of a service: one of ours whose beginning was not answered, or that is ending."""
        with suppress(ValueError):  # nobody has it
            self.ray.kill(self.ray.get_actor(name), no_restart=True)

    def _give_back(self) -> None:
        while self._given_up:
            self.ray.util.remove_placement_group(self._given_up[-1])
            self._given_up.pop()

    # ---- scaling -------------------------------------------------------------------------------------------------

    def wish(self, change: Callable[[RayLayout], None]) -> None:
        """Have the next look change the layout. From any thread."""
        self._wishes.append(change)

    def flipped(self, name: str, kind: str) -> None:
        """The worker is of this kind now; so is its child, should it be started anew. From any thread."""

        def note(layout: RayLayout) -> None:
            layout.flipped[name] = kind
            if name in self.actors:
                self.actors[name].handle.change.remote(kind)

        self.wish(note)

    def _take_wishes(self) -> None:
        """Tell `millrace scale` how things are; do what it, and who controls the workers, has asked for since."""
        while self._wishes:
            self._wishes.popleft()(self.layout)
        deployed = Deployed(counts=self.layout.counts(), services=self.states(), scaled=self._scaled)
        command, wanted = self.ray.get(self._holder.exchange.remote(deployed), timeout=CALL_SECONDS)
        if wanted:
            self.layout.scale(wanted)
            log.info("scaling to %s", ", ".join(f"{name}={count}" for name, count in wanted.items()))
        self._scaled = command

    def _let_go(self, name: str) -> None:
        """One without an answer, as one for which there is no room, has no child that could drain."""
        actor = self.actors.get(name)
        if actor is not None:
            actor.look()
            actor.leave(self.drain)
            if actor.report is not None and not actor.report.left:
                return
            self.ray.kill(actor.handle, no_restart=True)
            del self.actors[name]
        else:
            self._free(name)
        empty = self.layout.left(name)
        log.info("%s has left", name)
        placed = None if empty is None else self._placed.pop(empty.number, None)
        if placed is not None:
            self._given_up.append(placed.group)

    def states(self) -> Mapping[str, str]:
        """Every service that is to be there or leaves, by its name: waiting, starting, running or leaving."""
        states = {}
        for _, _, service in self.layout.services():
            actor = self.actors.get(service.name)
            states[service.name] = "waiting" if actor is None else actor.state
        return states | dict.fromkeys(self.layout.leaving, "leaving")


def claim(ray: Any, groups: Sequence[str]) -> Any:
    """The actor that holds the name of a deployment with these groups: Ray's namespace.

    Raises ValueError if another has it.
    """
    namespace = ray.get_runtime_context().namespace
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    remote = ray.remote(DeploymentActor).options(
        name=DEPLOYMENT, num_cpus=0, max_restarts=-1, scheduling_strategy=here, runtime_env=own_niceness()
    )
    try:
        holder = remote.remote(groups)
    except ValueError:
        raise ValueError(
            f"a deployment {namespace!r} runs on this Ray cluster already: stop it, or give this one a name of its own"
            " ([ray] name in a placement file)"
        ) from None
    return holder
