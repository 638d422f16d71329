"""Hosts of a group's ranks as processes of their own, which share nothing with the leader's but the network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deploy.worker.rank_hosts import RankHosts
from serving.config import ModelConfig
from serving.rank_group.host_door import HostSecurity
from serving.rank_group.leader import SpreadModel, load_spread
from tests.serving.rank_group.groups import DEADLINE

LEAVING_SECONDS = 60.0
APART = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def can_be_apart() -> bool:
    """Whether processes may have a namespace of processes of their own here."""
    with suppress(OSError):
        return subprocess.run([*APART, "true"], check=False, capture_output=True).returncode == 0
    return False


@dataclass
class HostProcess:
    """`millrace serve MODEL --headless`, with `ranks` from `start` on."""

    folder: Path
    port: int
    ranks: int
    start: int
    local: int = 1
    dtype: str = "float32"
    arguments: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)
    apart: bool = False

    def __post_init__(self) -> None:
        self.log = self.folder.parent / f"host-{self.start}-{self.port}.log"
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [*(APART if self.apart else ()), sys.executable, "-m", "deploy.cli", "serve", str(self.folder)]
        command += ["--headless", "--enable-expert-parallel", "--data-parallel-size", str(self.ranks)]
        command += ["--data-parallel-size-local", str(self.local), "--data-parallel-start-rank", str(self.start)]
        command += ["--data-parallel-rpc-port", str(self.port), "--dtype", self.dtype, "--threads", str(self.local)]
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*command, *self.arguments],
                env=os.environ | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def again(self) -> None:
        """Another process, as a supervisor starts one."""
        self.close()
        self.process = self._started()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LEAVING_SECONDS)


@contextmanager
def spread_over_hosts(
    folder: Path,
    hosts: Sequence[HostProcess],
    *,
    ranks: int,
    local: int,
    deadline: float = DEADLINE,
    dtype: str = "float32",
    security: HostSecurity | None = None,
) -> Iterator[SpreadModel]:
    """The model at `folder`, one thread a rank; hosts are ended with it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(local)
    try:
        asked = RankHosts(local, "127.0.0.1", hosts[0].port, security or HostSecurity())
        lobby = asked.lobby(folder, ModelConfig(dtype=dtype, data_parallel_size=ranks))
        spread = load_spread(folder, dtype, None, ranks, deadline, lobby=lobby)
        try:
            yield spread
        finally:
            spread.ranks.close()
    finally:
        torch.set_num_threads(threads)
        for host in hosts:
            host.close()
