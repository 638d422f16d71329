"""Asks a running server's HTTP API for plain data, for the commands that show it: `millrace explain` and `top`.

It knows no router: what it shows is what GET answers, behind the API key where one is required.
"""

from __future__ import annotations

import argparse
import os
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from serving.errors import InvalidRequest, NotFound, Unauthorized, Unavailable
from serving.given_files import read_given
from serving.options import ENV_PREFIX

URL = "http://localhost:8000"
KEY = ENV_PREFIX + "API_KEY"
ANSWER_SECONDS = 10.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, metavar="URL", help=f"the server's address (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's API key; better set {KEY}")
    parser.add_argument(
        "--server-cert",
        type=Path,
        metavar="FILE",
        help="the certificate that a server with an https address has, the first in this file: it is trusted whatever"
        " names it has, and no other is (default: those that this host's authorities sign)",
    )


class Server:
    """One server. `url` may end in /v1 or not. Raises ValueError for what is no http address, or no https one.

    `certificate` is a file with the one that an https server shows, read anew at each call: it may be renewed.
    """

    def __init__(self, url: str, key: str | None, certificate: Path | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url}: give an address such as {URL}")
        self.address = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        if certificate is not None and not self._tls:
            raise ValueError(f"--server-cert with --url {url}: only an https address has a certificate")
        self._certificate = certificate
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    @staticmethod
    def of(arguments: argparse.Namespace) -> Server:
        """The server that the arguments name. Of several keys, the first is shown."""
        key = arguments.api_key or os.environ.get(KEY) or ""
        return Server(arguments.url, key.split(",")[0], arguments.server_cert)

    def _connect(self) -> HTTPConnection:
        if not self._tls:
            return HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        if self._certificate is None:
            return HTTPSConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        return PinnedConnection(self._host, self._port, certificate_in(self._certificate))

    def get(self, *steps: str, headers: dict[str, str] | None = None) -> Any:
        """The JSON at a path, of these steps. Raises Unavailable, Unauthorized, NotFound or InvalidRequest."""
        path = self._root + "".join(f"/{quote(step, safe='')}" for step in steps)
        try:
            connection = self._connect()
        except OSError as error:
            raise Unavailable(f"--server-cert {self._certificate}: {error}") from error
        try:
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            answer = connection.getresponse()
            body = orjson.loads(answer.read() or b"null")
        except (OSError, HTTPException) as error:
            raise Unavailable(f"no answer from {self.address}: {error}") from error
        except orjson.JSONDecodeError as error:
            raise Unavailable(f"{self.address}{path} does not answer as millrace does") from error
        finally:
            connection.close()
        if answer.status == 200:
            return body
        kind = {401: Unauthorized, 404: NotFound}.get(answer.status, InvalidRequest)
        told = body.get("error") if isinstance(body, dict) else None
        said = told.get("message") if isinstance(told, dict) else None
        raise kind(str(said or f"{self.address}{path} answered {answer.status}"))


class PinnedConnection(HTTPSConnection):
    """To the server that has this certificate, PEM, whatever name it is reached by.

    Of an authority's, one that it has signed is another: `connect` raises ssl.SSLCertVerificationError for that.
    """

    def __init__(self, host: str, port: int | None, certificate: str):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be an authority's
        context.load_verify_locations(cadata=certificate)
        self._only = ssl.PEM_cert_to_DER_cert(certificate)
        super().__init__(host, port, timeout=ANSWER_SECONDS, context=context)

    def connect(self) -> None:
        super().connect()
        if self.sock.getpeercert(binary_form=True) != self._only:
            self.close()
            raise ssl.SSLCertVerificationError("certificate verify failed: its own is needed, not its authority's")


def certificate_in(file: Path) -> str:
    """The first certificate in a file, in PEM. Raises OSError where there is none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, begun, rest = read_given(file).decode("ascii", errors="replace").partition(begin)
    body, ended, _ = rest.partition(end)
    if not begun or not ended:
        raise FileNotFoundError("there is no certificate in it")
    return begun + body.replace("\ufffd", "?") + ended
