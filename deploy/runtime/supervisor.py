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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from serving.child_process import import_path, module_command, signal_child
from serving.fork_server import ForkedProcess, ForkServer, ForkUnavailable
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


class ForkedChild:
    """A forked process, with what `asyncio.subprocess.Process` has for one."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self.pid = process.pid
        self._ended = asyncio.Event()
        self._descriptor = process.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self._over)

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        code = self.process.returncode
        assert code is not None
        return code

    def _over(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self.process.wait()
        self._ended.set()


Child = asyncio.subprocess.Process | ForkedChild


class Supervisor:
    """`start()` the children, `stop()` them all. `module` of ours is what runs as a child.

    Those that begin with one of the words `forking` are forked where that can be, from a process that has imported
    the modules of `preload`: several share what they import, and one that died is back seconds sooner.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        environ: Mapping[str, str],
        module: str = CHILD_MODULE,
        *,
        forking: Collection[str] = (),
        preload: Sequence[str] = (),
    ):
        self.children = {child.name: child for child in children}
        self.module = module
        self.forking = forking
        of_ours = (ENV_PREFIX, "VLLM_API_KEY")
        own = {name: value for name, value in os.environ.items() if not name.startswith(of_ours)}
        self.environ = {
            **own,
            "PYTHONPATH": import_path(own),
            **environ,
        }  # our settings reach children as flags; the API's port and key are not theirs
        self.processes: dict[str, Child] = {}
        self._forks = ForkServer(preload, self.environ)
        self._forker = ThreadPoolExecutor(1, thread_name_prefix="fork")  # one at a time: the first takes seconds
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
            try:
                process = self.processes[name] = await self._started(child)
                ended = f"ended with {_ending(await process.wait())}"
            except OSError as error:
                ended = f"cannot be started: {error}"
            if self._stopping or name not in self.children:
                return
            pause = FIRST_PAUSE if time.monotonic() - began > YOUNG else min(2 * pause, LONGEST_PAUSE)
            log.warning("%s %s; starting it again in %.1f s", name, ended, pause)
            await asyncio.sleep(pause)

    async def _started(self, child: ChildSpec) -> Child:
        environ = {**self.environ, **child.environ}
        if child.arguments[0] in self.forking:
            try:
                return _watched(await self._forked(child, environ))
            except ForkUnavailable as error:
                log.debug("%s starts with an interpreter of its own: %s", child.name, error)
        return await asyncio.create_subprocess_exec(
            *module_command(self.module),
            *child.arguments,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _forked(self, child: ChildSpec, environ: Mapping[str, str]) -> ForkedProcess:
        """Raises ForkUnavailable. Where nobody waits for it any more the process is ended again."""
        try:
            starting = self._forker.submit(self._forks.start, self.module, child.arguments, environ)
        except RuntimeError as error:  # no thread is left
            raise ForkUnavailable(str(error)) from error
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_unwanted)
            raise

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
        self._forks.close()
        self._forker.shutdown()


def _watched(process: ForkedProcess) -> ForkedChild:
    """Raises OSError where it cannot be, and ends it."""
    try:
        return ForkedChild(process)
    except OSError:
        process.kill()
        process.wait()
        raise


def _unwanted(starting: Future[ForkedProcess]) -> None:
    """Called by whichever thread sees it end."""
    if not starting.cancelled() and starting.exception() is None:
        process = starting.result()
        process.kill()
        process.wait()


def _ask_to_leave(process: Child) -> None:
    signal_child(process, signal.SIGTERM)
    signal_child(process, signal.SIGCONT)  # one that is stopped would hear it only when it goes on


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    named = {number.value: number.name for number in signal.Signals}
    return f"signal {named.get(-code, -code)}"
