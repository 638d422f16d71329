"""Authorities of the tests' own, and certificates of theirs in files: valid, expired, for another name."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serving.security_config import SecurityConfig

SERVICE = "millrace.test"
BOTH_USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True)
class Files:
    """Where a service's certificate, its key and its authorities lie."""

    certificate: Path
    key: Path
    authorities: Path

    def security(self, **more: object) -> SecurityConfig:
        return SecurityConfig(
            grpc_tls_certfile=str(self.certificate),
            grpc_tls_keyfile=str(self.key),
            grpc_tls_ca=str(self.authorities),
            **{"grpc_tls_server_name": SERVICE, **more},  # type: ignore[arg-type]
        )

    def flags(self) -> list[str]:
        own = ("--grpc-tls-certfile", self.certificate, "--grpc-tls-keyfile", self.key)
        return [str(word) for word in (*own, "--grpc-tls-ca", self.authorities, "--grpc-tls-server-name", SERVICE)]


class Authority:
    """Signs certificates with a key of its own."""

    def __init__(self, name: str = "authority"):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self.name, self.name, self.key, days=30)
        self.certificate = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self.key, hashes.SHA256()
        )
        self.pem = self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, *, days: float = 10, name: str = SERVICE, only: x509.ObjectIdentifier | None = None
    ) -> tuple[bytes, bytes]:
        """A certificate for `name` and 127.0.0.1 and its key; with negative `days` it has expired.

        `only` is the one use it is for.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = (
            _builder(subject, self.name, key, days=days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([only] if only is not None else list(BOTH_USES)), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return (
            made.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, *form),
        )

    def files(self, folder: Path, *, days: float = 10, name: str = SERVICE, trusts: bytes | None = None) -> Files:
        """A new certificate in this folder, and the authorities that its holder trusts: this one."""
        folder.mkdir(parents=True, exist_ok=True)
        found = Files(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        replace(found.authorities, trusts or self.pem)
        self.renew(found, days=days, name=name)
        return found

    def renew(self, files: Files, *, days: float = 10, name: str = SERVICE) -> None:
        certificate, key = self.issue(days=days, name=name)
        replace(files.certificate, certificate)
        replace(files.key, key)


def replace(path: Path, content: bytes) -> None:
    """At once, as those do who renew certificates."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.rename(path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=20))
        .not_valid_after(now + timedelta(days=days))
    )
