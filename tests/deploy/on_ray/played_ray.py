"""A Ray library that is played: it has as much room as a test says, and loses the answers that a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deploy.on_ray.actors import ActorReport, DeploymentActor
from deploy.on_ray.library import own_niceness


class RayError(Exception):
    """All of the library's."""


class RayActorError(RayError):
    """The actor is dead."""


class ActorUnavailableError(RayError):
    """It does not answer now."""


class GetTimeoutError(RayError):
    """The answer has not come in time."""


class RayTaskError(RayError):
    """What an actor's method has raised."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class PlayedGroup:
    """A placement group and its state, which a test changes."""

    name: str
    state: str


@dataclass(eq=False)
class PlayedActor:
    """The actor of a service. It answers once there is room for it, until it is dead."""

    name: str
    group: PlayedGroup
    dead: bool = False
    leaving: bool = False
    left: bool = False
    begun: int = 1
    command: tuple[str, ...] = ()
    changed: list[str] = field(default_factory=list)  # what its child is to be started as

    def report_now(self) -> ActorReport:
        if self.dead:
            raise RayActorError(f"{self.name} is dead")
        return ActorReport(node="n", pid=None if self.left else 1, leaving=self.leaving, left=self.left)


def remote(call: Callable[..., Any]) -> Any:
    """A method of an actor: `.remote(…)` makes the question, which is put when its answer is waited for."""
    return SimpleNamespace(remote=lambda *given: lambda: call(*given))


@dataclass
class PlayedRay:
    """`room` says whether new groups are placed; `lost` how many answers of the deployment's own actor are lost."""

    room: bool = True
    fails: int = 0  # so many placement groups cannot be made
    lost: int = 0
    drains: bool = True  # children that are told to leave have left at once
    groups: list[PlayedGroup] = field(default_factory=list)
    actors: dict[str, PlayedActor] = field(default_factory=dict)
    holder: DeploymentActor | None = None
    breaking: Mapping[int, bool] = field(default_factory=dict)  # calls that fail, by number: True: with what they did
    calls: int = 0

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
        GetTimeoutError=GetTimeoutError,
        RayTaskError=RayTaskError,
    )

    @property
    def util(self) -> Any:
        return SimpleNamespace(
            placement_group=self.placement_group,
            placement_group_table=lambda group: self.call(lambda: {"state": group.state}),
            remove_placement_group=lambda group: self.call(lambda: setattr(group, "state", "REMOVED")),
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: group,
                NodeAffinitySchedulingStrategy=lambda node, soft: None,
            ),
        )

    def call(self, does: Callable[[], Any]) -> Any:
        """One that may fail, before it has done anything or after."""
        self.calls += 1
        breaks = self.breaking.get(self.calls)
        if breaks is not False:
            done = does()
        if breaks is not None:
            raise RayError(f"call {self.calls} has failed")
        return done

    def get_actor(self, name: str) -> Any:
        actor = self.actors.get(name)
        if actor is None or actor.dead:
            raise ValueError(f"nobody is {name}")
        return SimpleNamespace(played=actor)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(namespace="tests", get_node_id=lambda: "n")

    def placement_group(self, bundles: list[Any], strategy: str, name: str) -> PlayedGroup:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no group could be made")
        self.calls += 1
        if self.calls in self.breaking:
            raise RayError(f"call {self.calls} has failed")
        self.groups.append(PlayedGroup(name, "CREATED" if self.room else "PENDING"))
        return self.groups[-1]

    def remote(self, kind: type) -> Any:
        def begin(options: dict[str, Any], *given: Any) -> Any:
            if kind is DeploymentActor:
                self.holder = DeploymentActor(*given)
                return SimpleNamespace(exchange=remote(self.holder.exchange))
            name, group = given[0], options["scheduling_strategy"]
            before = self.actors.get(name)
            if before is not None and not before.dead:
                raise ValueError(f"the name {name} is taken")
            begun = before.begun + 1 if before else 1
            self.actors[name] = actor = PlayedActor(name, group, begun=begun, command=given[1])
            return SimpleNamespace(
                played=actor,
                report=SimpleNamespace(remote=lambda: self.call(lambda: actor.report_now)),
                change=SimpleNamespace(remote=lambda kind: self.call(lambda: actor.changed.append(kind))),
                leave=SimpleNamespace(remote=lambda _: self.call(lambda: self.leave(actor))),
            )

        def options(**options: Any) -> Any:
            assert options["runtime_env"] == own_niceness()
            return SimpleNamespace(remote=lambda *given: self.call(lambda: begin(options, *given)))

        return SimpleNamespace(options=options)

    def leave(self, actor: PlayedActor) -> None:
        actor.leaving, actor.left = True, self.drains

    def kill(self, handle: Any, no_restart: bool) -> None:
        played = getattr(handle, "played", None)
        if played is not None:
            self.call(lambda: setattr(played, "dead", True))

    def wait(self, asked: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return self.call(lambda: (asked, []) if self.room else ([], asked))  # type: ignore[no-any-return]

    def get(self, asked: Callable[[], Any], timeout: float | None = None) -> Any:
        try:
            answer = asked()
        except ValueError as error:
            raise RayTaskError(error) from error
        if timeout is not None and self.lost:
            self.lost -= 1
            raise GetTimeoutError("the answer was lost")
        return answer
