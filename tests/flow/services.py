"""Routers and workers as processes on their own, as an operator starts them: started, killed, told to leave, replaced.

What each says of itself it is asked over its own HTTP door.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fakes.forks import Running
from tests.flow.ports import free_port
from tests.flow.server import START_SECONDS, MillraceServer, start_millrace, wait_until

STEPPED_BACK = 5  # a nice value
REPOSITORY = str(Path(__file__).resolve().parents[2])


def launch(arguments: Sequence[str], log: Any) -> Running:
    """`millrace` with these arguments; `log` takes what it prints."""
    return start_millrace(*arguments, log=log, environ={"OMP_NUM_THREADS": "1"})


class RouterService(MillraceServer):
    """`millrace router`, on ports that it keeps when it is started again."""

    def __init__(self, model: str, *flags: str):
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.worker_names: list[str] = []
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log", prefix="millrace-router-", delete=False)  # noqa: SIM115
        ports = ("--port", str(self.port), "--grpc-port", str(self.grpc_port))
        self.arguments = ("router", model, *ports, *flags)
        self.start()

    def start(self) -> None:
        self.process = launch(self.arguments, self._log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class WorkerService:
    """One worker, by name. The next one of the name is another process, on other ports."""

    def __init__(self, role: str, name: str, model: str, routers: Sequence[RouterService], *flags: str):
        self.name = name
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log", prefix=f"millrace-{name}-", delete=False)  # noqa: SIM115
        addresses = ",".join(router.address for router in routers)
        self.arguments = (role, model, "--worker-name", name, "--routers", addresses, *flags)
        self.arguments += ("--parent", str(os.getpid()))  # it leaves with the tests
        self.start()

    def start(self) -> None:
        self.port = free_port()
        self.process = launch((*self.arguments, "--metrics-port", str(self.port)), self._log)

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def counts(self) -> dict[str, int]:
        """What it says it holds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/audit", timeout=10) as answer:
            found: dict[str, int] = json.loads(answer.read())
            return found

    def step_back(self) -> None:
        """From now on it takes what others leave of the processors: its streams do not hold up what is starting."""
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), STEPPED_BACK)

    def leave(self, seconds: float) -> None:
        """SIGTERM, and see that it left by itself, in good order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(seconds) == 0, self.log()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Services:
    """Routers, and workers that report to all of them. Use as a context manager."""

    def __init__(
        self,
        model: Path,
        routers: int,
        roles: Sequence[str],
        router_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
    ):
        self._stack = ExitStack()
        self.routers = [RouterService(str(model), *router_flags) for _ in range(routers)]
        for router in self.routers:
            self._stack.callback(router.stop)
        self.workers: dict[str, WorkerService] = {}
        for role in roles:
            name = f"{role}-{sum(each.startswith(role) for each in self.workers)}"
            self.workers[name] = WorkerService(role, name, str(model), self.routers, *worker_flags)
            self._stack.callback(self.workers[name].stop)

    def __enter__(self) -> Services:
        try:
            for router in self.routers:
                self.wait_known(router)
            for worker in self.workers.values():
                worker.step_back()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_known(self, router: RouterService, seconds: float = START_SECONDS) -> None:
        """The router has heard all workers that there are, and would serve."""

        def known() -> bool:
            assert router.process.poll() is None, router.log()
            ready, _ = router.get("/health")
            return ready == 200 and self.living(router) == set(self.workers)

        wait_until(known, seconds, f"the router knows its workers; its log:\n{router.log()}")

    def living(self, router: RouterService) -> set[str]:
        """Names of the workers that the router would give work."""
        workers = json.loads(router.get("/v1/workers")[1])["workers"]
        return {worker["name"] for worker in workers if worker["state"] == "live"}

    def replace(self, name: str, seconds: float) -> None:
        """Have the worker leave, start the next one of its name, and wait until every router gives it work."""
        self.workers[name].leave(seconds)
        self.workers[name].start()
        for router in self.routers:
            self.wait_known(router)
        self.workers[name].step_back()

    def held(self) -> dict[str, int]:
        """Leases by worker, as the workers count them."""
        return {name: worker.counts()["leases"] for name, worker in self.workers.items()}
