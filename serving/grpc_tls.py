"""TLS of the gRPC between services: both sides show certificates, from files that are read anew when they change.

A server asks for the files at every connection. A client's channel keeps what it was made with: who calls makes
another one when `current` gives another identity (serving.rpc.Caller).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from serving.certificate import CertificateFacts, read_certificate
from serving.given_files import read_given
from serving.reloaded import LOOK_SECONDS, ReloadedFiles
from serving.security_config import SecurityConfig

QUIET_SECONDS = 0.05  # what gRPC does meanwhile takes less than a thousandth of it
NEVER_MS = (1 << 31) - 1  # gRPC's word for no bound


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """A certificate with its chain, its key, and the authorities by which others are judged: PEM texts."""

    certificate: bytes
    key: bytes
    authorities: bytes
    facts: CertificateFacts


class GrpcTls:
    """The files that `security` names. Raises ValueError that names the flags, if they cannot be used now."""

    def __init__(self, security: SecurityConfig, *, look_seconds: float = LOOK_SECONDS):
        certificate, key, authorities = (
            security.grpc_tls_certfile,
            security.grpc_tls_keyfile or security.grpc_tls_certfile,
            security.grpc_tls_ca,
        )
        if certificate is None or key is None or authorities is None:
            raise ValueError("gRPC with TLS takes both --grpc-tls-certfile and --grpc-tls-ca")
        self.server_name = security.grpc_tls_server_name
        self.connection_age = security.grpc_tls_connection_age
        paths = (certificate, key, authorities)
        try:
            self.files = ReloadedFiles(paths, lambda: _identity(*paths), look_seconds=look_seconds)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--grpc-tls-certfile {certificate}, --grpc-tls-keyfile {key}, --grpc-tls-ca {authorities}: {error}"
            ) from None

    def current(self) -> Identity:
        return self.files.current()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server that refuses clients without a certificate of its authorities."""
        news = _News(self.files)
        return grpc.dynamic_ssl_server_credentials(_configuration(news.given), news, True)

    def server_options(self) -> list[tuple[str, Any]]:
        """Connections end after a while, so that others are made with the certificates of then; calls go on."""
        age = int(1000 * self.connection_age)
        return [("grpc.max_connection_age_ms", age), ("grpc.max_connection_age_grace_ms", NEVER_MS)]

    def channel_credentials(self, identity: Identity) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(identity.authorities, identity.key, identity.certificate)

    def channel_options(self) -> list[tuple[str, Any]]:
        """Services are reached by addresses that no certificate can have, as those of pods: a name is agreed on."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name is not None else []


def grpc_tls(security: SecurityConfig) -> GrpcTls | None:
    """None without any of the files. Raises ValueError."""
    return GrpcTls(security) if security.grpc_tls_asked else None


class _News:
    """What a server is told at each connection: another identity once, and None while there is no other.

    gRPC puts what it is told in the place of what it has without a lock, and crashes if another connection takes that
    at this moment. So none is let on for a while before, nor after: those that wait here are not there.
    """

    def __init__(self, files: ReloadedFiles[Identity]):
        self.files = files
        self.given = files.current()
        self._quiet_until = 0.0
        self._lock = threading.Lock()  # gRPC asks from threads of its own

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            time.sleep(max(0.0, self._quiet_until - time.monotonic()))
            now = self.files.current()
            if now is self.given:
                return None
            told = _configuration(now)
            time.sleep(QUIET_SECONDS)
            self.given, self._quiet_until = now, time.monotonic() + QUIET_SECONDS
            return told


def _identity(certificate: str, key: str, authorities: str) -> Identity:
    """Raises OSError and ValueError."""
    facts = read_certificate(certificate, key, authorities)
    return Identity(
        certificate=read_given(certificate),
        key=read_given(key),
        authorities=read_given(authorities),
        facts=facts,
    )


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], identity.authorities)
