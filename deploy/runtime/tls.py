"""HTTPS: the certificate of the HTTP server, read anew when it changes, and whether its clients have to show one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from serving.certificate import CertificateFacts, no_password, read_certificate
from serving.config import HttpConfig
from serving.given_files import check_regular
from serving.reloaded import LOOK_SECONDS, ReloadedFiles

_ASKED = {"0": ssl.CERT_NONE, "1": ssl.CERT_OPTIONAL, "2": ssl.CERT_REQUIRED}


@dataclass(frozen=True, eq=False, slots=True)
class HttpsIdentity:
    """What handshakes are answered with, and what the certificate says."""

    context: ssl.SSLContext
    facts: CertificateFacts


def https_files(http: HttpConfig, *, look_seconds: float = LOOK_SECONDS) -> ReloadedFiles[HttpsIdentity] | None:
    """None for plain HTTP. Raises ValueError that names the flag and what is wrong with it."""
    context = server_context(http)
    if context is None:
        return None
    named = (http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs)
    return ReloadedFiles(
        [name for name in named if name is not None], lambda: _identity(http), look_seconds=look_seconds
    )


def _identity(http: HttpConfig) -> HttpsIdentity:
    context, certificate = server_context(http), http.ssl_certfile
    assert context is not None and certificate is not None
    try:
        return HttpsIdentity(context, read_certificate(certificate, http.ssl_keyfile))
    except OSError as error:
        raise ValueError(f"--ssl-certfile {certificate}: {error}") from None


def server_context(http: HttpConfig) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises ValueError that names the flag and what is wrong with it."""
    if http.ssl_certfile is None:
        for flag, given in (("keyfile", http.ssl_keyfile), ("ca-certs", http.ssl_ca_certs)):
            if given is not None:
                raise ValueError(f"--ssl-{flag} has no use without --ssl-certfile")
    if http.ssl_cert_reqs != "0" and http.ssl_ca_certs is None:
        raise ValueError(f"--ssl-cert-reqs {http.ssl_cert_reqs} needs --ssl-ca-certs: whose certificates clients show")
    if http.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        check_regular(http.ssl_certfile)  # OpenSSL would wait for a FIFO
        check_regular(http.ssl_keyfile or http.ssl_certfile)
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, password=no_password)
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise ValueError(f"--ssl-certfile {http.ssl_certfile}, --ssl-keyfile {http.ssl_keyfile}: {error}") from None
    if http.ssl_ca_certs is not None:
        try:
            check_regular(http.ssl_ca_certs)
            context.load_verify_locations(http.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ValueError(f"--ssl-ca-certs {http.ssl_ca_certs}: {error}") from None
        context.verify_mode = _ASKED[http.ssl_cert_reqs]
    return context
