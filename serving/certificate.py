"""Looks at a certificate and its key as a peer would: by a handshake with itself, in memory.

What is wrong with them is told by OpenSSL, as it would be told to those who connect.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving.given_files import check_regular

FLIGHTS = 8  # turns of both sides; a handshake takes three


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """`expires` in Unix time; `names` as they stand in it, such as `DNS:millrace` or `IP Address:127.0.0.1`."""

    expires: float
    names: tuple[str, ...] = ()

    def seconds_left(self, clock: Callable[[], float] = time.time) -> float:
        """Negative once it has expired."""
        return self.expires - clock()


def read_certificate(certfile: str, keyfile: str | None, authorities: str | None = None) -> CertificateFacts:
    """The facts of a certificate that its key fits and that is valid now.

    With `authorities`, a file, these have to vouch for it both as a server's and as a client's. Raises OSError, of
    which an ssl.SSLError is one, and ValueError.
    """
    for path in (certfile, keyfile, authorities):
        if path is not None:
            check_regular(path)  # OpenSSL would wait for a FIFO
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # by which name it is reached, who asks will see
    for context in (server, client):
        context.load_verify_locations(authorities or certfile)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_cert_chain(certfile, keyfile, password=no_password)
    if authorities is not None:
        client.load_cert_chain(certfile, keyfile, password=no_password)
        server.verify_mode = ssl.CERT_REQUIRED
    seen = _handshake(server, client)
    names = tuple(f"{kind}:{name}" for kind, name in seen.get("subjectAltName", ()))
    return CertificateFacts(ssl.cert_time_to_seconds(seen["notAfter"]), names)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> Any:
    """What the client sees of the server's certificate. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    waiting = [asking, server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(FLIGHTS):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    return asking.getpeercert() or {}


def no_password() -> str:
    """Else OpenSSL asks for one on the terminal, and waits."""
    raise ValueError("the key has a password, which cannot be given; `openssl pkey -in KEY -out NEW` takes it off")
