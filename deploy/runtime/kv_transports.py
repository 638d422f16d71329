"""Which transports a service may move KV over: those that open no port to others, unless that is permitted.

NIXL listens on every interface of the host, and neither asks who comes nor encrypts: who reaches its port can write
into the process.
"""

from __future__ import annotations

import os

from deploy.runtime.open_doors import is_loopback
from kvcache.transfer.choice import AUTO, WITHIN_HOST
from kvcache.transfer.nixl_agent import KIND as NIXL
from serving.config import ClusterConfig
from serving.security_config import SecurityConfig

INTERFACES = "UCX_NET_DEVICES"  # where NIXL, by UCX, listens


def kv_transport_of(wanted: str, cluster: ClusterConfig, security: SecurityConfig) -> str:
    """What `--kv-transport` may mean for this service. Raises ValueError for NIXL where others would reach it."""
    if security.insecure:
        return wanted
    if wanted == NIXL and not is_loopback(cluster.grpc_host):
        raise ValueError(
            f"--kv-transport nixl with --grpc-host {cluster.grpc_host}: NIXL would listen to the network without a key"
            " and without encryption; leave it out, and KV goes over gRPC; --insecure permits it"
        )
    return WITHIN_HOST if wanted == AUTO else wanted


def keep_nixl_on_loopback(transport: str, security: SecurityConfig) -> None:
    """Call before NIXL starts in this process. What the user's environment says of interfaces goes before."""
    if transport == NIXL and not security.insecure:
        os.environ.setdefault(INTERFACES, "lo")
