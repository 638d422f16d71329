"""HTTPS whose files change: new connections see them, old ones go on, and half of a pair changes nothing."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from deploy.runtime.tls import https_files
from serving.certificate_metrics import certificate_text
from serving.config import HttpConfig
from serving.text.tokenizer import Tokenizer
from tests.certificates import Authority, Files, replace
from tests.deploy.runtime.door import door
from tests.fakes.generate import tiny_tokenizer

Run = Callable[[Coroutine[Any, Any, None]], None]
BOTH = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
REFUSALS = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def authority() -> Authority:
    return Authority()


def client_of(authority: Authority, own: Files | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return httpx.AsyncClient(verify=context, timeout=60, limits=httpx.Limits(keepalive_expiry=600))


def settings(files: Files) -> dict[str, Any]:
    named = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key, "ssl_ca_certs": files.authorities}
    return {**{name: str(path) for name, path in named.items()}, "ssl_cert_reqs": "2"}


async def answers(port: int, client: httpx.AsyncClient) -> bool:
    """True if a new connection is let in."""
    async with client:
        try:
            return (await client.get(f"https://127.0.0.1:{port}/live")).status_code == 200
        except REFUSALS:
            return False


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


@BOTH
def test_certificates_and_authorities_are_renewed(
    run: Run, authority: Authority, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    new = Authority("new")
    files, client = authority.files(tmp_path / "server"), authority.files(tmp_path / "client")
    client_of_new = new.files(tmp_path / "new", trusts=authority.pem)

    async def scenario() -> None:
        patient = {**settings(files), "keep_alive_timeout": 600.0}
        async with door(tokenizer, **patient) as made, client_of(authority, client) as kept:
            port, certificates = made.server.port, made.server.certificates
            assert certificates is not None

            async def alive() -> bool:
                return (await kept.get(f"https://127.0.0.1:{port}/live")).status_code == 200

            assert await alive()
            assert not await answers(port, client_of(authority, client_of_new))
            replace(files.authorities, authority.pem + new.pem)
            await until(lambda: answers(port, client_of(authority, client_of_new)))
            certificate, key = new.issue()
            replace(files.key, key)
            await until(lambda: _true(certificates.current() and certificates.failures == 1))
            assert await answers(port, client_of(authority, client)), "half of a pair changes nothing"
            replace(files.certificate, certificate)
            await until(lambda: answers(port, client_of(new, client_of_new)))
            assert not await answers(port, client_of(authority, client)), "it shows the new one alone"
            replace(files.authorities, new.pem)
            await until(lambda: _not(answers(port, client_of(new, client))))
            assert await answers(port, client_of(new, client_of_new)) and certificates.failures == 1
            assert await alive(), "a connection outlives all of it"

    run(scenario())


async def _true(value: bool) -> bool:
    return value


async def _not(asked: Coroutine[Any, Any, bool]) -> bool:
    return not await asked


def test_who_shows_no_good_certificate_is_refused(authority: Authority, tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = authority.files(tmp_path / "server")

    async def scenario() -> None:
        async with door(tokenizer, **settings(files)) as made:
            port = made.server.port
            assert await answers(port, client_of(authority, authority.files(tmp_path / "good")))
            assert not await answers(port, client_of(authority)), "none"
            assert not await answers(port, client_of(authority, authority.files(tmp_path / "old", days=-1))), "expired"
            assert not await answers(port, client_of(authority, Authority("x").files(tmp_path / "x"))), "another's"
            plain = await made.client()
            await plain.send(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" not in await plain.ended(), "plain HTTP"

    asyncio.run(scenario())


def test_an_expired_certificate_of_the_server_is_told_of_at_start(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, days=-1)
    flags = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    command = [sys.executable, "-m", "deploy.cli", "router", "no-model", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--ssl-certfile" in done.stderr and "expired" in done.stderr


def test_metrics_tell_when_it_expires_and_what_was_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, days=2)
    http = HttpConfig(ssl_certfile=str(files.certificate), ssl_keyfile=str(files.key))
    watched = https_files(http, look_seconds=0.0)
    replace(files.key, authority.issue()[1])
    text = certificate_text({"https": watched, "grpc": None}).decode()
    left = float(text.split('millrace:certificate_expiry_seconds{certificate="https"} ')[1].split()[0])
    assert 1.9 * 86400 < left < 2 * 86400 and "grpc" not in text
    assert 'millrace:certificate_reload_failures_total{certificate="https"} 1.0' in text
