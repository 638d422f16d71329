"""Commands that ask a server over HTTPS trust the certificate they are given, whatever names it has, and no other."""

from __future__ import annotations

import ssl
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy.admin import Server, add_server_arguments
from serving.errors import Unavailable
from tests.certificates import Authority, Files


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


class QuietServer(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """Who does not trust it hangs up."""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority().files(tmp_path / "ours")


@pytest.fixture
def url(files: Files) -> Iterator[str]:
    with served(files) as found:
        yield found


@contextmanager
def served(files: Files) -> Iterator[str]:
    """An address whose name the certificate does not have."""
    server = QuietServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"https://localhost:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str, *more: str) -> object:
    parser = ArgumentParser()
    add_server_arguments(parser)
    return Server.of(parser.parse_args(["--url", url, *more])).get("v1", "workers")


def test_the_certificate_that_is_given_is_trusted(url: str, files: Files) -> None:
    assert asked(url, "--server-cert", str(files.certificate)) == {}


def test_no_other_is(url: str, files: Files, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="certificate verify failed"):
        asked(url)
    for other in (Authority("another").files(tmp_path / "theirs"), Authority().files(tmp_path / "alike")):
        with pytest.raises(Unavailable, match="certificate verify failed"):
            asked(url, "--server-cert", str(other.certificate))


def test_a_file_without_one_is_told_of(url: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for file in (empty, tmp_path / "missing.pem"):
        with pytest.raises(Unavailable, match=f"--server-cert {file}: "):
            asked(url, "--server-cert", str(file))


def test_of_its_authority_another_certificate_is_not_trusted(tmp_path: Path) -> None:
    """Who has any certificate of an authority is not the server for it: names are not looked at."""
    authority = Authority()
    ours = authority.files(tmp_path / "ours")
    with served(ours) as url:
        for other in (ours.authorities, authority.files(tmp_path / "another", name="elsewhere.test").certificate):
            with pytest.raises(Unavailable, match="certificate verify failed"):
                asked(url, "--server-cert", str(other))


@pytest.mark.parametrize(
    "before", ["# Müller & Söhne\n", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_what_else_is_in_the_file_does_not_matter(url: str, files: Files, tmp_path: Path, before: str) -> None:
    file, own = tmp_path / "chain.pem", files.certificate.read_text()
    file.write_text(before + own + Authority("next").pem.decode() + "ä", encoding="utf-8")
    assert asked(url, "--server-cert", str(file)) == {}


@pytest.mark.parametrize("inside", ["ä", "", "AAAA", "?"])
def test_what_is_no_certificate_is_told_of(url: str, tmp_path: Path, inside: str) -> None:
    file = tmp_path / "odd.pem"
    file.write_text(f"-----BEGIN CERTIFICATE-----\n{inside}\n-----END CERTIFICATE-----\n", encoding="utf-8")
    with pytest.raises(Unavailable, match=f"--server-cert {file}: "):
        asked(url, "--server-cert", str(file))


def test_an_address_without_one_is_refused(files: Files) -> None:
    with pytest.raises(ValueError, match="only an https address has a certificate"):
        asked("http://localhost:9", "--server-cert", str(files.certificate))


def test_one_that_was_renewed_is_read_anew(url: str, files: Files, tmp_path: Path) -> None:
    file = tmp_path / "tls.crt"
    file.write_bytes(Authority("before").files(tmp_path / "before").certificate.read_bytes())
    server = Server(url, None, file)
    with pytest.raises(Unavailable, match="certificate verify failed"):
        server.get("v1", "workers")
    file.write_bytes(files.certificate.read_bytes())
    assert server.get("v1", "workers") == {}
