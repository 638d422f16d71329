"""A router and its workers as processes of their own, every gRPC connection between two of them a link that can break.

KV travels over gRPC: shared memory and NIXL would go around the proxies.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.fakes.fault_proxy import FaultNetwork
from tests.fakes.stopping import harm
from tests.flow.ports import free_port
from tests.flow.server import Asking, end, start_millrace

ROUTER = "router"
MODEL_FLAGS = ("--served-model-name", "tiny", "--dtype", "float32")
ENGINE_FLAGS = ("--kernels", "torch", "--threads", "1", "--num-kv-blocks", "512", "--num-speculative-tokens", "0")


class ChaosCluster(Asking):
    """`millrace router` and one worker for each role given. Use as a context manager.

    Workers are named as `millrace serve` names them, prefill-0 and so on; the router is `router`.
    """

    def __init__(
        self,
        model: Path,
        roles: Sequence[str] = ("prefill", "prefill", "decode", "decode"),
        *,
        router_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
    ):
        self.workers = [f"{role}-{roles[:number].count(role)}" for number, role in enumerate(roles)]
        self.network = FaultNetwork()
        self._grpc = {name: f"127.0.0.1:{free_port()}" for name in (ROUTER, *self.workers)}
        self._logs = Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
        self._open: list[IO[str]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", self.workers)
        common = (str(model), *MODEL_FLAGS, "--host", "127.0.0.1")
        self._commands = {ROUTER: ("router", *common, "--port", str(port), *router_flags)}
        for name, role in zip(self.workers, roles, strict=True):
            known = ("--worker-name", name, "--routers", self._grpc[ROUTER], "--kv-transport", "grpc")
            self._commands[name] = (role, *common, *ENGINE_FLAGS, *known, *worker_flags)

    # ---- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> ChaosCluster:
        self.network.__enter__()
        try:
            for name, address in self._grpc.items():
                self.network.called(name, address)
                self.start(name)
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.network.heal()
        living = [process for process in self._processes.values() if process.poll() is None]
        for number in (signal.SIGCONT, signal.SIGTERM):
            for process in living:
                harm(process.pid, number)
        for process in living:
            end(process, 20.0)
        self.network.__exit__()
        for log in self._open:
            log.close()

    def start(self, name: str) -> None:
        """Start the process of this name, once more where it has died, where it was before."""
        log = (self._logs / f"{name}.log").open("a")
        self._open.append(log)
        where = ("--grpc-port", self._grpc[name].rpartition(":")[2])
        self._processes[name] = start_millrace(
            *self._commands[name], *where, log=log, environ=self.network.environ(name)
        )

    def running(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise AssertionError(f"{name} ended with {process.returncode}:\n{self.log_of(name)}")

    def log_of(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()

    def log(self) -> str:
        return "\n".join(f"---- {name}\n{self.log_of(name)}" for name in self._processes)

    # ---- doing harm --------------------------------------------------------------------------------------------

    def signal(self, name: str, number: signal.Signals) -> None:
        harm(self._processes[name].pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL; `start` brings it back."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].wait()

    # ---- how it stands -----------------------------------------------------------------------------------------

    def pairs(self) -> set[tuple[str, str]]:
        """Every prefill worker with every decode worker."""
        prefill = [name for name in self.workers if name.startswith("prefill")]
        return {(one, other) for one in prefill for other in self.workers if other.startswith("decode")}

    def idle(self) -> bool:
        """True if every one of the processes answers that it holds nothing."""
        audit = self.audit()
        return bool(audit["idle"]) and len(audit["services"]) == 1 + len(self.workers)
