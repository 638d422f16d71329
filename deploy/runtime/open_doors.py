"""Refuses to listen beyond loopback where anyone who gets there could ask for text, or register as a worker.

It decides by address and settings alone, before anything is bound. The status port, which shows figures and no text,
is left out: probes and scrapes carry no key.
"""

from __future__ import annotations

import ipaddress
import logging
import socket

from deploy.runtime.addresses import EVERYWHERE
from serving.config import ClusterConfig, HttpConfig
from serving.rank_hosts_config import RankHostsConfig
from serving.security_config import SecurityConfig
from serving.service_config import ServiceConfig

log = logging.getLogger(__name__)


def check_api(http: HttpConfig, service: ServiceConfig, security: SecurityConfig) -> None:
    """Raises ValueError if the HTTP API would answer anyone on the network."""
    keyed = http.api_key is not None or service.api_keys_file is not None
    certified = http.ssl_certfile is not None and http.ssl_cert_reqs == "2"
    if keyed or certified or is_loopback(http.host):
        return
    where = f"--host {http.host}: the API"
    _refuse_unless(
        security.insecure,
        where,
        "set MILLRACE_API_KEY (--api-key) or --api-keys-file, or ask for client certificates (--ssl-cert-reqs 2)",
    )


def check_grpc(cluster: ClusterConfig, security: SecurityConfig) -> None:
    """Raises ValueError if anyone on the network could call this service's gRPC."""
    if cluster.cluster_key is not None or security.grpc_tls_asked or is_loopback(cluster.grpc_host):
        return
    where = f"--grpc-host {cluster.grpc_host}: this service"
    _refuse_unless(
        security.insecure,
        where,
        "set MILLRACE_CLUSTER_KEY (--cluster-key), the same for every service, or --grpc-tls-certfile and"
        " --grpc-tls-ca",
    )


def check_rank_hosts(hosts: RankHostsConfig, cluster: ClusterConfig, security: SecurityConfig) -> None:
    """Raises ValueError if anyone on the network could join this worker's ranks."""
    if cluster.cluster_key is not None or security.grpc_tls_asked or is_loopback(hosts.data_parallel_address):
        return
    where = f"--data-parallel-address {hosts.data_parallel_address}: the leader of the ranks"
    _refuse_unless(
        security.insecure,
        where,
        "set MILLRACE_CLUSTER_KEY (--cluster-key), the same on every host, or --grpc-tls-certfile and --grpc-tls-ca",
    )


def _refuse_unless(insecure: bool, where: str, instead: str) -> None:
    if not insecure:
        raise ValueError(
            f"{where} would answer anyone who reaches it: {instead}; or listen on 127.0.0.1; --insecure permits it"
        )
    log.warning("%s answers anyone who reaches it, as --insecure permits", where)


def is_loopback(host: str) -> bool:
    """True if only this host reaches what listens on `host`; a name with several addresses has to mean it with all."""
    if host.startswith("unix:"):
        return True
    bare = host.removeprefix("[").removesuffix("]")
    if bare in EVERYWHERE:
        return False
    try:
        found = {str(where[0]) for *_, where in socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)}
    except OSError:  # it will not be listened on either
        return False
    return all(_is_loopback_address(ipaddress.ip_address(address)) for address in found)


def _is_loopback_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
