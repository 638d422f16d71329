"""Which address others are told: where a service listens is not always where it is reached.

It opens no connection: the host's routing table alone says which of its addresses leads to a peer.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from serving.config import ClusterConfig

log = logging.getLogger(__name__)

EVERYWHERE = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - to be recognised, not bound


def announced(cluster: ClusterConfig, port: int, peers: Sequence[str]) -> str:
    """host:port at which `peers` (host:port) reach the gRPC of this service: --advertise, or else where it listens.

    A service that listens everywhere announces the address that leads to the first peer it has a way to.
    """
    if cluster.advertise is not None:
        return cluster.advertise
    if cluster.grpc_host not in EVERYWHERE:
        return f"{cluster.grpc_host}:{port}"
    host = next((found for peer in peers if (found := _own_address(peer)) is not None), None)
    address = f"{host or near(cluster.grpc_host)}:{port}"
    log.info("others are told to reach this service at %s; --advertise says otherwise", address)
    return address


def near(host: str) -> str:
    """An address at which a process of this host reaches what listens on `host`."""
    if host not in EVERYWHERE:
        return host
    return "[::1]" if ":" in host else "127.0.0.1"


def _own_address(peer: str) -> str | None:
    """Our address on the way to this peer; None where there is no way."""
    host, _, port = peer.rpartition(":")
    try:
        (family, kind, *_, where), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # of a datagram socket: nothing is sent
            found: str = probe.getsockname()[0]
    except (OSError, ValueError):
        return None
    return f"[{found}]" if ":" in found else found
