"""TLS between real services: who gets in at each gRPC port, and everything renewed under requests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.certificates import SERVICE, Authority, Files, replace
from tests.flow.client import Client
from tests.flow.listening import descendants, listening
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until

pytestmark = pytest.mark.slow
KEY, REPOSITORY = "key-of-this-test", str(Path(__file__).resolve().parents[2])
WORKERS = ["prefill-0", "decode-0"]
FLAGS = ("--prefill", "1", "--decode", "1", "--kvcache", "1", "--num-kv-blocks", "512", "--dtype", "float32")
FLAGS += ("--served-model-name", "tiny", "--kernels", "torch", "--kv-transport", "grpc", "--heartbeat-interval", "0.1")
FLAGS += ("--kvcache-fetch", "never", "--grpc-tls-connection-age", "1")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def code_of(port: int, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """How a call of no method ends: UNAVAILABLE where the connection is refused."""
    address, options = f"127.0.0.1:{port}", [("grpc.ssl_target_name_override", SERVICE)]
    made = grpc.secure_channel(address, credentials, options=options) if credentials else grpc.insecure_channel(address)
    with made as channel:
        try:
            channel.unary_unary("/no/such")(b"", timeout=20)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code
    raise AssertionError("there is such a method")


def credentials_of(authority: Authority, trusts: bytes, *, days: float = 10) -> grpc.ChannelCredentials:
    certificate, key = authority.issue(days=days)
    return grpc.ssl_channel_credentials(trusts, key, certificate)


def grpc_ports(server: MillraceServer) -> dict[str, int]:
    """By the command of who listens."""
    found = listening(server.process.pid)
    return {commands[0]: port for (_, port), commands in found.items() if port != server.port}


def cache_stat(port: int, *flags: str) -> int:
    """The exit code of `millrace cache stat`."""
    command = [sys.executable, "-m", "deploy.cli", "cache", "stat", "--nodes", f"127.0.0.1:{port}", *flags]
    environ = {**os.environ, "PYTHONPATH": REPOSITORY, "MILLRACE_CLUSTER_KEY": KEY}
    return subprocess.run(command, env=environ, capture_output=True, timeout=120).returncode


class Requests:
    """One after the other from a thread, until `stop`: their texts."""

    def __init__(self, client: Client, prompt: list[int]):
        self.client, self.prompt = client, prompt
        self.texts: list[str] = []
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                asked = self.client.start(self.prompt, stream=True, max_tokens=24, temperature=0)
                self.texts.append(self.client.finish([asked])[0][0])
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert self.error is None and not self._thread.is_alive(), self.error


@pytest.fixture
def old(tmp_path: Path) -> tuple[Authority, Files]:
    authority = Authority("old")
    return authority, authority.files(tmp_path / "service")


@pytest.fixture
def server(tiny_path: Path, old: tuple[Authority, Files]) -> Iterator[MillraceServer]:
    flags, environ = old[1].flags(), {"MILLRACE_CLUSTER_KEY": KEY}
    with MillraceServer(str(tiny_path), *FLAGS, *flags, workers=WORKERS, environ=environ) as started:
        yield started


def test_every_port_refuses_strangers_and_everything_is_renewed_under_requests(
    server: MillraceServer, old: tuple[Authority, Files]
) -> None:
    authority, files = old
    ports, new, stranger = grpc_ports(server), Authority("new"), Authority("stranger")
    assert set(ports) == {"serve", "prefill", "decode", "kvcache"}
    for port in ports.values():
        assert code_of(port, credentials_of(authority, authority.pem)) is not UNAVAILABLE
        assert code_of(port, None) is UNAVAILABLE, "plaintext"
        assert code_of(port, grpc.ssl_channel_credentials(authority.pem)) is UNAVAILABLE, "no certificate"
        assert code_of(port, credentials_of(stranger, authority.pem)) is UNAVAILABLE, "of another authority"
        assert code_of(port, credentials_of(authority, authority.pem, days=-1)) is UNAVAILABLE, "expired"
        assert code_of(port, credentials_of(authority, stranger.pem)) is UNAVAILABLE, "the client trusts another"
    processes = set(descendants(server.process.pid))
    client, [prompt] = Client(server.url), prompts(1, shortest=100, longest=100, seed=5)

    def everywhere(signing: Authority, trusts: bytes, let_in: bool = True) -> None:
        for name, port in ports.items():
            wait_until(
                lambda port=port: (code_of(port, credentials_of(signing, trusts)) is not UNAVAILABLE) == let_in,
                30,
                f"{name} has taken the files",
            )

    requests = Requests(client, prompt)
    wait_until(lambda: len(requests.texts) > 1, 60, "requests are answered")
    replace(files.authorities, authority.pem + new.pem)
    everywhere(new, authority.pem)
    certificate, key = new.issue()
    replace(files.key, key)
    wait_until(lambda: server.metric("certificate_reload_failures_total") >= 1, 30, "half of a pair is seen")
    everywhere(authority, authority.pem)
    replace(files.certificate, certificate)
    everywhere(new, new.pem)
    replace(files.authorities, new.pem)
    everywhere(authority, new.pem, let_in=False)
    everywhere(new, new.pem)
    answered = len(requests.texts)
    wait_until(lambda: len(requests.texts) > answered + 3, 60, "requests are answered after all of it")
    requests.stop()
    client.close()
    wait_until(lambda: server.metric("pool_blocks", tier="ram") > 0, 30, "KV is stored in the pool")
    assert cache_stat(ports["kvcache"], *files.flags()) == 0 and cache_stat(ports["kvcache"]) == 2
    assert len(set(requests.texts)) == 1 and requests.texts[0]
    assert server.metric("replacements_total") == 0, "no try failed"
    assert set(descendants(server.process.pid)) == processes, "nothing was restarted"
    assert 9 * 86400 < server.metric("certificate_expiry_seconds", certificate="grpc") < 10 * 86400
