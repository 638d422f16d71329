"""Which ranks of a worker are on which host, and where these meet. It opens no socket."""

from __future__ import annotations

from dataclasses import dataclass

from serving.options import ConfigError, option

RPC_PORT = 29550


@dataclass(frozen=True, kw_only=True)
class RankHostsConfig:
    """Ranks of a worker on several hosts."""

    data_parallel_size_local: int | None = option(
        None,
        "how many of --data-parallel-size are on this host; default: all that are not on others. Those of other hosts"
        " hold experts, and the KV and the requests are the leader's",
        least=1,
    )
    data_parallel_address: str = option(
        "127.0.0.1", "address on which the leader listens for the hosts of other ranks, and at which these find it"
    )
    data_parallel_rpc_port: int = option(
        RPC_PORT, "port of it; workers of one host that have ranks elsewhere need one each", least=1, most=65535
    )
    data_parallel_start_rank: int | None = option(
        None, "with --headless: the first rank on this host; the leader's host has those from 0 on", least=1
    )
    headless: bool = option(
        False, "only hold experts of a worker whose leader is on another host: no API, no router, no requests"
    )

    def local(self, ranks: int) -> int:
        """How many of a leader's ranks are on its own host."""
        return ranks if self.data_parallel_size_local is None else self.data_parallel_size_local

    def spans_hosts(self, ranks: int) -> bool:
        return self.headless or self.local(ranks) != ranks

    def check(self, ranks: int, *, spread: bool, balanced: bool, workers: int = 1) -> None:
        """Raises ConfigError for what cannot be.

        `spread`: the ranks of a worker hold experts, on a CPU; `balanced`: experts move; `workers` are started here.
        """
        start, size = self.data_parallel_start_rank, self.data_parallel_size_local
        if start is not None and not self.headless:
            raise ConfigError(
                "--data-parallel-start-rank is a host's that has ranks of a leader elsewhere: give it --headless too",
                param="data_parallel_start_rank",
            )
        if self.headless and start is None:
            raise ConfigError(
                "--headless: say which ranks this host has, --data-parallel-start-rank and --data-parallel-size-local",
                param="headless",
            )
        if self.spans_hosts(ranks) and not spread:
            raise ConfigError(
                "ranks on other hosts hold experts of a mixture, and compute on CPUs: --data-parallel-size above 1,"
                " --enable-expert-parallel and --device cpu",
                param="headless" if self.headless else "data_parallel_size_local",
            )
        if self.spans_hosts(ranks) and balanced:
            raise ConfigError(
                "--enable-eplb moves experts through memory that all ranks share, and no memory is shared by several"
                " hosts: leave out one of the two",
                param="enable_eplb",
            )
        if self.spans_hosts(ranks) and workers > 1:
            raise ConfigError(
                f"--data-parallel-size-local: the hosts of other ranks join one worker, and {workers} are to be"
                " started: start one here, or each by a command of its own with a --data-parallel-rpc-port of its own",
                param="data_parallel_size_local",
            )
        end = (start or 0) + (size or 1)
        if end > ranks:
            first = "" if start is None else f"from rank {start} on "
            raise ConfigError(
                f"--data-parallel-size-local {size or 1}: {first}there are {ranks - (start or 0)} ranks of"
                f" --data-parallel-size {ranks}",
                param="data_parallel_size_local",
            )

    def hosted(self, ranks: int) -> tuple[int, int]:
        """The first rank and how many there are of them, with --headless."""
        start = self.data_parallel_start_rank or 0
        return start, ranks - start if self.data_parallel_size_local is None else self.data_parallel_size_local
