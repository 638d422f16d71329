"""HTTPS on either event loop: answers, streams, refusals, client certificates, and what a handshake may take."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from deploy import cli
from deploy.cli import main
from deploy.runtime import http_connection
from deploy.runtime.connection_table import ConnectionTable
from deploy.runtime.http_connection import Connection
from deploy.runtime.tls import server_context
from deploy.runtime.tls_acceptor import Handshake, TlsAcceptor
from serving.config import HttpConfig
from serving.text.tokenizer import Tokenizer
from tests.deploy.runtime.door import door
from tests.fakes.generate import KEY, MODEL, tiny_tokenizer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
Run = Callable[[Coroutine[Any, Any, None]], None]
BOTH = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 20, "ignore_eos": True}


def certificate(folder: Path, name: str, *more: str) -> tuple[str, str]:
    """A self-signed one for 127.0.0.1: the files of certificate and key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    named = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *named, *(more or ("-nodes",))], check=True, capture_output=True)
    return str(cert), str(key)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def someone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return certificate(tmp_path_factory.mktemp("client"), "someone")


def trusting(cert: str, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cert)
    if own is not None:
        context.load_cert_chain(*own)
    return context


@BOTH
def test_answers_streams_and_refusals_come_over_tls(
    run: Run, server: tuple[str, str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = server
    monkeypatch.setattr(http_connection, "LINGER_S", 600.0)

    async def scenario() -> None:
        async with door(tokenizer, ssl_certfile=cert, ssl_keyfile=key, api_key=KEY) as made:
            made.go.set()
            url, context = f"https://127.0.0.1:{made.server.port}", trusting(cert)
            async with httpx.AsyncClient(base_url=url, verify=context, timeout=60) as client:
                assert (await client.post("/v1/completions", json=BODY)).status_code == 401
                client.headers["authorization"] = f"Bearer {KEY}"
                for _ in range(2):
                    answer = await client.post("/v1/completions", json=BODY)
                    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 20
                async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
                    lines = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
                assert lines[-1] == "data: [DONE]" and len(lines) > 10
                assert (await client.get("/v1/models", headers={f"x-{i}": "x" for i in range(150)})).status_code == 431
            reader, writer = await asyncio.open_connection("127.0.0.1", made.server.port, ssl=context)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            writer.write(f"{head}content-length: 5000000\r\n\r\n".encode())
            told = await reader.readuntil(b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 413 ") and b"connection: close" in told
            async with asyncio.timeout(60):  # the end is said at once, although the body has not come
                await reader.read()
            writer.close()
            plain = await made.client()
            await plain.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" not in await plain.ended(), "no plain HTTP beside it"

    run(scenario())


@BOTH
def test_clients_show_a_certificate_where_they_must(
    run: Run, server: tuple[str, str], someone: tuple[str, str], tokenizer: Tokenizer
) -> None:
    cert, key = server
    files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": someone[0]}

    async def status(port: int, context: ssl.SSLContext) -> int:
        async with httpx.AsyncClient(verify=context, timeout=60) as client:
            return (await client.get(f"https://127.0.0.1:{port}/live")).status_code

    async def scenario() -> None:
        async with door(tokenizer, **files, ssl_cert_reqs="2") as made:
            assert await status(made.server.port, trusting(cert, someone)) == 200
            for own in (None, server):
                with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
                    await status(made.server.port, trusting(cert, own))
        async with door(tokenizer, **files) as made:
            assert await status(made.server.port, trusting(cert)) == 200, "they are not asked"

    run(scenario())


@BOTH
def test_a_handshake_has_as_long_as_headers(run: Run, server: tuple[str, str], tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with door(tokenizer, ssl_certfile=server[0], ssl_keyfile=server[1], header_timeout=0.3) as made:
            silent = await made.client()
            async with asyncio.timeout(60):
                assert await silent.ended() == b""

    run(scenario())


def test_a_key_may_stand_in_the_certificates_file(server: tuple[str, str], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(server[0]).read_text() + Path(server[1]).read_text())
    assert server_context(HttpConfig(ssl_certfile=str(both))) is not None
    assert server_context(HttpConfig()) is None


def test_what_cannot_be_used_is_one_clear_line(
    server: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    cert, key = server
    locked = certificate(tmp_path, "locked", "-passout", "pass:secret")
    for flags, said in (
        (["--ssl-keyfile", key], "--ssl-keyfile has no use without --ssl-certfile"),
        (["--ssl-ca-certs", cert], "--ssl-ca-certs has no use without --ssl-certfile"),
        (["--ssl-certfile", "/no/such.pem"], "No such file"),
        (["--ssl-certfile", cert], "--ssl-certfile"),
        (["--ssl-certfile", cert, "--ssl-keyfile", locked[1]], "password"),
        (["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", key], "--ssl-ca-certs"),
    ):
        assert main(["serve", "/no/such/model", *flags]) == 2
        err = capfd.readouterr().err
        assert err.startswith("millrace: ") and said in err and err.count("\n") == 1, flags


@BOTH
def test_connections_in_their_handshake_count(run: Run, server: tuple[str, str], tokenizer: Tokenizer) -> None:
    """Before: any number of them was held."""
    cert, key = server

    async def scenario() -> None:
        async with door(tokenizer, ssl_certfile=cert, ssl_keyfile=key, max_connections=5, header_timeout=30.0) as made:
            table, port = made.server.table, made.server.port
            made.go.set()
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            async with asyncio.timeout(60):
                for reader, _ in silent[:-5]:  # evicted, the oldest first
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""
            assert len(table) == table.idle_count == 5
            async with httpx.AsyncClient(verify=trusting(cert), timeout=60) as client:
                answer = await client.post(f"https://127.0.0.1:{port}/v1/completions", json=BODY)
                assert answer.status_code == 200 and len(table) == 5
            for _, writer in silent:
                writer.close()
            async with asyncio.timeout(60):
                while len(table):
                    await asyncio.sleep(0.01)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("tls-")]

    run(scenario())


@BOTH
def test_connections_are_accepted_whatever_becomes_of_one(
    run: Run, server: tuple[str, str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = server
    admit, broken = TlsAcceptor._admit, list[str]()

    def breaks(acceptor: TlsAcceptor, accepted: socket.socket, network: str) -> None:
        if not broken:
            broken.append(network)
            accepted.close()
            raise RuntimeError("a mistake over one connection")
        admit(acceptor, accepted, network)

    monkeypatch.setattr(TlsAcceptor, "_admit", breaks)

    async def scenario() -> None:
        async with door(tokenizer, ssl_certfile=cert, ssl_keyfile=key) as made:
            url = f"https://127.0.0.1:{made.server.port}/live"
            async with httpx.AsyncClient(verify=trusting(cert), timeout=60) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(url)
                assert (await client.get(url)).status_code == 200

    run(scenario())
    assert broken


@BOTH
def test_a_handshake_that_has_not_begun_is_left_nowhere(run: Run, server: tuple[str, str]) -> None:
    """Before: asyncio kept its place in the table, and its socket until the garbage was collected."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        table: ConnectionTable[Connection] = ConnectionTable(5, 5)
        context = server_context(HttpConfig(ssl_certfile=server[0], ssl_keyfile=server[1]))
        assert context is not None
        handshake = Handshake(ours, context, lambda: pytest.fail("a connection was made"), table, 1.0)
        table.admit(handshake, "network")
        task = handshake.begin()
        handshake.abort()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(table) == 0 and ours.fileno() == -1
        theirs.close()

    run(scenario())
