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
from dataclasses import dataclass

from serving.child_process import import_path, module_command
from serving.options import ENV_PREFIX

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5  # seconds before a dead child is started again; doubles while it keeps dying young
LONGEST_PAUSE = 15.0
YOUNG = 20.0  # seconds: a child that lived longer is not crash-looping


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """A child: its name in logs, and the millrace command it runs."""

    name: str
    arguments: tuple[str, ...]


class Supervisor:
    """`start()` the children, `stop()` them all. `module` of ours is what runs as a child."""

    def __init__(self, children: Sequence[ChildSpec], environ: Mapping[str, str], module: str = "deploy.cli"):
        self.children = children
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
        for child in self.children:
            self._tasks[child.name] = asyncio.create_task(self._keep(child), name=f"keep-{child.name}")

    async def _keep(self, child: ChildSpec) -> None:
        """Run the child, again and again, until we stop."""
        pause = FIRST_PAUSE / 2
        while not self._stopping:
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *module_command(self.module),
                *child.arguments,
                env=self.environ,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            self.processes[child.name] = process
            code = await process.wait()
            if self._stopping:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > YOUNG else min(2 * pause, LONGEST_PAUSE)
            log.warning("%s ended with %s; starting it again in %.1f s", child.name, _ending(code), pause)
            await asyncio.sleep(pause)

    async def stop(self, seconds: float) -> None:
        """Ask every child to leave, and kill those that have not within this time."""
        self._stopping = True
        running = {name: process for name, process in self.processes.items() if process.returncode is None}
        for process in running.values():
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped would hear it only when it goes on
        for name, task in self._tasks.items():
            if name not in running:  # it waits to start its child again
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        for name, process in self.processes.items():
            if process.returncode is None:
                log.warning("%s did not leave in %.0f s and is killed", name, seconds)
                process.kill()
                await process.wait()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    named = {number.value: number.name for number in signal.Signals}
    return f"signal {named.get(-code, -code)}"
