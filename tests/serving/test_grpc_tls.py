"""gRPC with certificates on both sides: who is refused and told why, and files that change under calls."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from serving.certificate import read_certificate
from serving.errors import WorkerLost
from serving.grpc_tls import GrpcTls, _News, grpc_tls
from serving.rpc import Caller, asking, listen, server
from serving.security_config import SecurityConfig
from tests.certificates import SERVICE, Authority, Files, replace

ECHO = "/test.Echo/Say"
WHO = b"who am I?"


USES = {"server's": ExtendedKeyUsageOID.SERVER_AUTH, "client's": ExtendedKeyUsageOID.CLIENT_AUTH}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for message in messages:
        yield context.auth_context()["x509_pem_cert"][0] if message == WHO else message


@asynccontextmanager
async def echoing(tls: GrpcTls | None) -> AsyncIterator[str]:
    """A server that repeats what it is told, or says which certificate the caller showed; its address."""
    made = server(None, tls)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    made.add_registered_method_handlers("test.Echo", {"Say": handler})
    port = listen(made, "127.0.0.1", 0, tls)
    await made.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await made.stop(0)


async def say(caller: Caller, message: bytes = b"hello") -> bytes:
    with asking(caller.address):
        call = caller.channel.stream_stream(ECHO)(timeout=20.0)
        await call.write(message)
        await call.done_writing()
        answer = await call.read()
        assert await call.code() is grpc.StatusCode.OK
        found: bytes = answer
        return found


def fast(files: Files, **more: object) -> GrpcTls:
    return GrpcTls(files.security(**more), look_seconds=0.0)


async def test_both_sides_show_certificates(authority: Authority, tmp_path: Path) -> None:
    async with echoing(fast(authority.files(tmp_path / "server"))) as address:
        caller = Caller(address, tls=fast(authority.files(tmp_path / "client")))
        assert await say(caller) == b"hello"
        await caller.close()


async def test_who_has_been_closed_stays_closed_when_certificates_change(authority: Authority, tmp_path: Path) -> None:
    async with echoing(fast(authority.files(tmp_path / "server"))) as address:
        files = authority.files(tmp_path / "client")
        caller = Caller(address, tls=fast(files))
        await caller.close()
        authority.renew(files)
        with pytest.raises(WorkerLost):
            await say(caller)


async def test_by_the_address_where_no_name_is_agreed_on(authority: Authority, tmp_path: Path) -> None:
    tls = fast(authority.files(tmp_path / "server"), grpc_tls_server_name=None)
    async with echoing(tls) as address:
        caller = Caller(address, tls=tls)
        assert await say(caller) == b"hello"
        await caller.close()


async def refused(caller: Caller) -> WorkerLost:
    with pytest.raises(WorkerLost) as raised:
        await say(caller)
    await caller.close()
    return raised.value


async def test_a_plaintext_client_is_refused(authority: Authority, tmp_path: Path) -> None:
    async with echoing(fast(authority.files(tmp_path))) as address:
        assert "certificate" in (await refused(Caller(address, "key"))).message


async def test_a_client_without_a_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    async with echoing(fast(files)) as address:
        bare = grpc.ssl_channel_credentials(files.authorities.read_bytes())
        options = [("grpc.ssl_target_name_override", SERVICE)]
        async with grpc.aio.secure_channel(address, bare, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.stream_stream(ECHO)(timeout=20.0).read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("days", [10, -1], ids=["of another authority", "expired"])
async def test_a_client_with_a_wrong_certificate_is_refused(authority: Authority, tmp_path: Path, days: int) -> None:
    files = authority.files(tmp_path / "server")
    tls = fast(files)
    async with echoing(tls) as address:
        signing = authority if days < 0 else Authority("another")
        certificate, key = signing.issue(days=days)
        shown = grpc.ssl_channel_credentials(authority.pem, key, certificate)
        options = [("grpc.ssl_target_name_override", SERVICE)]
        async with grpc.aio.secure_channel(address, shown, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.stream_stream(ECHO)(timeout=20.0).read()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("signed", "days", "name", "told"),
    [
        (False, 10, SERVICE, "CERTIFICATE_VERIFY_FAILED"),
        (True, -1, SERVICE, "certificate has expired"),
        (True, 10, "other.test", "Hostname Verification Check failed"),
    ],
    ids=["of another authority", "expired", "of another name"],
)
async def test_a_client_says_what_is_wrong_with_the_server(
    authority: Authority, tmp_path: Path, signed: bool, days: int, name: str, told: str
) -> None:
    certificate, key = (authority if signed else Authority("another")).issue(days=days, name=name)
    made = grpc.aio.server()
    shown = grpc.ssl_server_credentials([(key, certificate)], authority.pem, require_client_auth=True)
    port = made.add_secure_port("127.0.0.1:0", shown)
    await made.start()
    error = await refused(Caller(f"127.0.0.1:{port}", tls=fast(authority.files(tmp_path))))
    await made.stop(0)
    assert told in error.message


async def test_a_client_is_told_of_a_server_without_tls(authority: Authority, tmp_path: Path) -> None:
    async with echoing(None) as address:
        error = await refused(Caller(address, tls=fast(authority.files(tmp_path))))
    assert "WRONG_VERSION_NUMBER" in error.message


async def test_calls_go_on_while_everything_is_renewed(tmp_path: Path) -> None:
    """The authority too: both are trusted, then certificates are of the new one, then the old one is dropped."""
    old, new = Authority("old"), Authority("new")
    first, second = old.files(tmp_path / "server"), old.files(tmp_path / "client")
    serving, calling = fast(first, grpc_tls_connection_age=0.2), fast(second)
    async with echoing(serving) as address:
        caller = Caller(address, tls=calling)
        stream = caller.channel.stream_stream(ECHO)()

        async def several() -> None:
            for _ in range(10):
                assert await say(caller) == b"hello"
                await stream.write(b"still here")
                assert await stream.read() == b"still here"

        await several()
        for files in (first, second):
            replace(files.authorities, old.pem + new.pem)
        await several()
        for files in (first, second):
            new.renew(files)
            await several()
        assert await say(caller, WHO) == second.certificate.read_bytes(), "calls are made with the new one"
        for files in (first, second):
            replace(files.authorities, new.pem)
            await several()
        gc.collect()
        await several()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF and await stream.code() is grpc.StatusCode.OK
        assert serving.files.failures == calling.files.failures == 0
        outsider = Caller(address, tls=fast(old.files(tmp_path / "outsider", trusts=old.pem + new.pem)))
        await refused(outsider)
        await caller.close()


async def test_a_pair_that_does_not_fit_leaves_the_last_one(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    tls = fast(files)
    async with echoing(tls) as address:
        before = tls.current()
        certificate, key = authority.issue()
        replace(files.certificate, certificate)
        caller = Caller(address, tls=tls)
        assert await say(caller) == b"hello" and tls.current() is before and tls.files.failures == 1
        replace(files.key, key[: len(key) // 2])
        assert tls.current() is before and tls.files.failures == 2
        replace(files.key, key)
        assert await say(caller) == b"hello" and tls.current() is not before and tls.files.failures == 2
        assert tls.current().certificate == certificate
        await caller.close()


def test_a_server_is_told_of_an_identity_once(authority: Authority, tmp_path: Path) -> None:
    """gRPC crashes when it is told at each of many connections."""
    files = authority.files(tmp_path)
    news = _News(fast(files).files)
    assert [news(), news()] == [None, None]
    authority.renew(files)
    assert news() is not None and [news(), news()] == [None, None]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("expired", "has expired"),
        ("foreign", "verify failed"),
        ("key", "mismatch"),
        ("server's", "purpose"),
        ("client's", "purpose"),
        ("missing", "No such file"),
        ("empty", "no certificate|NO_CERTIFICATE|no start line|PEM"),
    ],
)
def test_files_that_cannot_be_used_are_told_of_at_start(
    authority: Authority, tmp_path: Path, change: str, told: str
) -> None:
    files = authority.files(tmp_path, days=-1 if change == "expired" else 10)
    if change == "foreign":
        replace(files.authorities, Authority("another").pem)
    elif change == "key":
        replace(files.key, authority.issue()[1])
    elif change in USES:
        for path, content in zip((files.certificate, files.key), authority.issue(only=USES[change]), strict=True):
            replace(path, content)
    elif change == "missing":
        files.key.unlink()
    elif change == "empty":
        replace(files.certificate, b"")
    with pytest.raises(ValueError, match=f"--grpc-tls-certfile .*({told})"):
        GrpcTls(files.security())


def test_half_of_the_flags_is_none(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    assert grpc_tls(SecurityConfig()) is None
    for given in ({"grpc_tls_ca": "a"}, {"grpc_tls_certfile": "a"}, {"grpc_tls_keyfile": "a"}):
        with pytest.raises(ValueError, match="--grpc-tls-ca"):
            grpc_tls(SecurityConfig(**given))  # type: ignore[arg-type]
    both = files.certificate.with_name("both.pem")
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    assert grpc_tls(SecurityConfig(grpc_tls_certfile=str(both), grpc_tls_ca=str(files.authorities))) is not None


def test_what_a_certificate_says(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, days=3)
    facts = read_certificate(str(files.certificate), str(files.key))
    assert f"DNS:{SERVICE}" in facts.names
    assert 2.9 * 86400 < facts.seconds_left() <= 3 * 86400
    assert facts.seconds_left(lambda: facts.expires + 1) == -1
