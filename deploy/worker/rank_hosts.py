"""Ranks of a worker on several hosts: the door that a leader opens for them, and what all hosts have in common."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from deploy.runtime.open_doors import check_rank_hosts
from deploy.runtime.settings import Settings
from serving import __version__
from serving.config import ModelConfig
from serving.kernels.cpu.build import sources_digest
from serving.loader.loading import digest_of
from serving.rank_group.host_door import HostIdentity, HostSecurity
from serving.rank_group.host_lobby import HostLobby

BACKLOG = 64  # hosts and strangers that nobody speaks to yet


@dataclass(frozen=True, slots=True)
class RankHosts:
    """A leader's: `local` ranks are here, and the others' hosts come to `address`."""

    local: int
    address: str
    port: int
    security: HostSecurity

    def lobby(self, path: Path, config: ModelConfig) -> HostLobby:
        """Where they come in for the model at `path`. Raises ValueError where nobody can listen there."""
        identity = identity_of(path, config)
        try:
            listening = socket.create_server((self.address, self.port), family=_family(self.address), backlog=BACKLOG)
        except OSError as error:
            raise ValueError(
                f"--data-parallel-address {self.address} --data-parallel-rpc-port {self.port}: cannot listen there"
                f" ({error.strerror or error}); each worker with ranks on other hosts needs a port of its own"
            ) from error
        return HostLobby(listening, identity, self.security, self.local)


def rank_hosts(settings: Settings) -> RankHosts | None:
    """None where all ranks are here. Raises ValueError for a door that anyone could come in by."""
    ranks, hosts = settings.model_config.data_parallel_size, settings.hosts
    if not hosts.spans_hosts(ranks):
        return None
    check_rank_hosts(hosts, settings.cluster, settings.security)
    return RankHosts(
        hosts.local(ranks), hosts.data_parallel_address, hosts.data_parallel_rpc_port, security_of(settings)
    )


def security_of(settings: Settings) -> HostSecurity:
    """By what services know each other, hosts of ranks do."""
    security = settings.security
    return HostSecurity(
        cluster_key=settings.cluster.cluster_key,
        certfile=security.grpc_tls_certfile,
        keyfile=security.grpc_tls_keyfile,
        authorities=security.grpc_tls_ca,
        server_name=security.grpc_tls_server_name,
    )


def identity_of(path: Path, config: ModelConfig) -> HostIdentity:
    """Raises ValueError as `load`."""
    digest, dtype = digest_of(path, config.dtype)
    ranks = config.data_parallel_size
    return HostIdentity(version=__version__, model=digest, dtype=dtype, ranks=ranks, kernels=sources_digest())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
