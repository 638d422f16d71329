"""Who may reach a service: the certificates of gRPC, and what --insecure permits. It opens no socket and no file."""

from __future__ import annotations

from dataclasses import dataclass

from serving.options import option


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Who may reach the services."""

    insecure: bool = option(
        False,
        "listen beyond loopback without a key and without TLS, where anyone may ask and register; let NIXL listen,"
        " which knows neither",
    )
    grpc_tls_certfile: str | None = option(
        None,
        "PEM file of this service's certificate and its chain: gRPC with TLS alone, where both sides show certificates."
        " Read anew when it changes, as are the next two",
    )
    grpc_tls_keyfile: str | None = option(
        None, "PEM file of the private key for --grpc-tls-certfile; default: that file itself"
    )
    grpc_tls_ca: str | None = option(
        None, "PEM file of the authorities whose certificates the other services show, and this one too"
    )
    grpc_tls_server_name: str | None = option(
        None, "name that is in the certificates of all services; default: each has the address it is reached at"
    )
    grpc_tls_connection_age: float = option(
        300.0, "seconds until connections are made anew, with the certificates of then; calls go on", least=0.1
    )

    @property
    def grpc_tls_asked(self) -> bool:
        """True if gRPC is to be encrypted, be what is given complete or not."""
        given = (self.grpc_tls_certfile, self.grpc_tls_keyfile, self.grpc_tls_ca, self.grpc_tls_server_name)
        return any(each is not None for each in given)
