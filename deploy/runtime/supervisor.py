"""Child processes of `millrace serve --prefill N --decode M`: started, restarted when they die, stopped with us.

Children share our standard error, so there is one log stream, and sit in sessions of their own, so that Ctrl-C
reaches only us and we stop them in order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving.child_process import import_path, module_command, signal_child
from serving.options import ENV_PREFIX

log = logging.getLogger(__name__)

CHILD_MODULE = "deploy.cli"
FIRST_PAUSE = 0.5  # seconds before a dead child is started again; doubles while it keeps dying young
LONGEST_PAUSE = 15.0
YOUNG = 20.0  # seconds: a child that lived longer is not crash-looping


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """A child: its name in logs, the millrace command it runs, and what its environment has beside ours."""

    name: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """`start()` the children, `stop()` them all. `module` of ours is what runs as a child."""

    def __init__(self, children: Sequence[ChildSpec], environ: Mapping[str, str], module: str = CHILD_MODULE):
        self.children = {child.name: child for child in children}
        self.module = module
        of_ours = (ENV_PREFIX, "VLLM_API_KEY")
        own = {name: value for name, value in os.environ.items() if not name.startswith(of_ours)}
        self.environ = {
            **own,
            "PYTHONPATH": import_path(own),
            **environ,
        }  # our settings reach children as flags; the API's port and key are not theirs
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the child that each keeps running

    def start(self) -> None:
        for child in self.children.values():
            self._begin(child)

    def add(self, child: ChildSpec) -> None:
        """One more; the name of one that is still leaving is taken."""
        assert child.name not in self._tasks, "a child's name is its own"
        self.children[child.name] = child
        self._begin(child)

    def change(self, child: ChildSpec) -> None:
        """What the child of this name is started with, should it die; the one that runs goes on."""
        self.children[child.name] = child

    def _begin(self, child: ChildSpec) -> None:
        self._tasks[child.name] = asyncio.create_task(self._keep(child.name), name=f"keep-{child.name}")

    async def let_go(self, name: str, seconds: float) -> None:
        """Ask the child to leave, for good, and kill it if it has not within this time."""
        del self.children[name]
        task, process = self._tasks[name], self.processes.get(name)
        if process is None or process.returncode is not None:
            task.cancel()  # it waits to start its child again
        else:
            _ask_to_leave(process)
        await asyncio.wait([task], timeout=seconds)
        process = self.processes.pop(name, None)
        if process is not None and process.returncode is None:
            log.warning("%s did not leave in %.0f s and is killed", name, seconds)
            signal_child(process, signal.SIGKILL)
            await process.wait()
        await asyncio.wait([task])
        self._tasks.pop(name)

    async def _keep(self, name: str) -> None:
        """Run the child, again and again, until we stop or let it go."""
        pause = FIRST_PAUSE / 2
        while not self._stopping and (child := self.children.get(name)) is not None:
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *module_command(self.module),
                *child.arguments,
                env={**self.environ, **child.environ},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            self.processes[name] = process
            code = await process.wait()
            if self._stopping or name not in self.children:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > YOUNG else min(2 * pause, LONGEST_PAUSE)
            log.warning("%s ended with %s; starting it again in %.1f s", name, _ending(code), pause)
            await asyncio.sleep(pause)

    async def stop(self, seconds: float) -> None:
        """Ask every child to leave, and kill those that have not within this time."""
        self._stopping = True
        running = {name: process for name, process in self.processes.items() if process.returncode is None}
        for process in running.values():
            _ask_to_leave(process)
        for name, task in self._tasks.items():
            if name not in running:  # it waits to start its child again
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        for name, process in list(self.processes.items()):
            if process.returncode is None:
                log.warning("%s did not leave in %.0f s and is killed", name, seconds)
                signal_child(process, signal.SIGKILL)
                await process.wait()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _ask_to_leave(process: asyncio.subprocess.Process) -> None:
    signal_child(process, signal.SIGTERM)
    signal_child(process, signal.SIGCONT)  # one that is stopped would hear it only when it goes on


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    named = {number.value: number.name for number in signal.Signals}
    return f"signal {named.get(-code, -code)}"
