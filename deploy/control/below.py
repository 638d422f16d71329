"""The workers that a front keeps running, as they are added, let go and told of: child processes, or actors elsewhere.

It decides nothing, and knows no router.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from deploy.runtime.devices import VISIBLE, visible_devices
from deploy.runtime.supervisor import ChildSpec, Supervisor
from serving.errors import InvalidRequest, Unavailable
from serving.messages import Role


class Below(Protocol):
    """What a front starts below it, and stops. Workers go by their names; those of `leaving` are no more in `roles`."""

    def start(self) -> None: ...

    async def stop(self, seconds: float) -> None: ...

    def roles(self) -> Mapping[str, Role]:
        """Every worker that is kept running, and as what it would begin."""
        ...

    def leaving(self) -> Sequence[str]:
        """Workers that were let go and have not left yet."""
        ...

    def add(self, role: Role) -> None:
        """Start one more. Raises Unavailable, InvalidRequest."""
        ...

    def let_go(self, name: str) -> None:
        """Have it drain and leave, for good. Raises InvalidRequest for one that is not kept here."""
        ...

    def flipped(self, name: str, role: Role) -> None:
        """It serves in this role now, and is to do so again should it be started anew. Others are nobody's matter."""


class ChildProcesses:
    """Workers and pool nodes as child processes of this one (Below). A child that drains has `drain_seconds`."""

    def __init__(self, supervisor: Supervisor, drain_seconds: float):
        self.supervisor = supervisor
        self.drain_seconds = drain_seconds
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self.supervisor.start()

    async def stop(self, seconds: float) -> None:
        await self.supervisor.stop(seconds)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    def roles(self) -> dict[str, Role]:
        children = self.supervisor.children.values()
        return {child.name: Role(child.arguments[0]) for child in children if child.arguments[0] in tuple(Role)}

    def leaving(self) -> list[str]:
        return list(self._leaving)

    def add(self, role: Role) -> None:
        """It is told what another of its role is told, or a worker of another role where there is none."""
        roles = self.roles()
        like = next((name for name, own in roles.items() if own is role), next(iter(roles), None))
        if like is None:
            raise Unavailable("no worker was started here, so there is none to start another like: start it by itself")
        taken = {*roles, *self._leaving}
        name = next(name for number in count() if (name := f"{role}-{number}") not in taken)
        child = _called(name, role, self.supervisor.children[like])
        self.supervisor.add(replace(child, environ=freest_device(child.environ, self.supervisor.children.values())))

    def let_go(self, name: str) -> None:
        if name not in self.roles():
            raise InvalidRequest(f"{name} was not started here: stop it where it was started", param="worker")
        task = asyncio.create_task(self.supervisor.let_go(name, self.drain_seconds), name=f"let-go-{name}")
        self._leaving[name] = task
        task.add_done_callback(lambda _: self._leaving.pop(name, None))

    def flipped(self, name: str, role: Role) -> None:
        if name in self.roles():
            child = self.supervisor.children[name]
            self.supervisor.change(replace(child, arguments=(role.value, *child.arguments[1:])))


def _called(name: str, role: Role, like: ChildSpec) -> ChildSpec:
    """A child of another name and role that is told what `like` is."""
    arguments = list(like.arguments)
    arguments[0] = role.value
    arguments[arguments.index("--worker-name") + 1] = name
    return replace(like, name=name, arguments=tuple(arguments))


def freest_device(environ: Mapping[str, str], others: Iterable[ChildSpec]) -> dict[str, str]:
    """The environment with the GPU that the fewest of the `others` use, where it names one."""
    if VISIBLE not in environ:
        return dict(environ)
    used = Counter(child.environ.get(VISIBLE) for child in others)
    return {**environ, VISIBLE: min(visible_devices(os.environ) or [environ[VISIBLE]], key=lambda one: used[one])}
