"""What a service refuses to listen on without a key, and what makes it do so all the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.runtime.open_doors import check_api, check_grpc, is_loopback
from serving.config import ClusterConfig, HttpConfig
from serving.security_config import SecurityConfig
from serving.service_config import ServiceConfig

CLOSED, OPEN = SecurityConfig(), SecurityConfig(insecure=True)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "::ffff:127.0.0.1", "127.1", "unix:/run/millrace"]
)
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "", "0", "10.0.0.5", "fe80::1", "::ffff:10.0.0.5", "127.0.0.1.example.invalid"]
)
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "10.0.0.5"}, True),
        ({"host": "0.0.0.0", "api_key": "key"}, False),
        ({"host": "0.0.0.0", "api_keys_file": "keys.jsonl"}, False),
        ({"host": "0.0.0.0", "ssl_certfile": "c"}, True),
        ({"host": "0.0.0.0", "ssl_certfile": "c", "ssl_ca_certs": "a", "ssl_cert_reqs": "1"}, True),
        ({"host": "0.0.0.0", "ssl_certfile": "c", "ssl_ca_certs": "a", "ssl_cert_reqs": "2"}, False),
    ],
)
def test_an_api_that_anyone_reaches_asks_who_it_is(settings: dict[str, str], refused: bool) -> None:
    given = dict(settings)
    service = ServiceConfig(api_keys_file=given.pop("api_keys_file", None))
    http = HttpConfig(**given)  # type: ignore[arg-type]
    if refused:
        with pytest.raises(ValueError, match=rf"{http.host}.*MILLRACE_API_KEY.*--ssl-cert-reqs 2.*--insecure"):
            check_api(http, service, CLOSED)
    else:
        check_api(http, service, CLOSED)
    check_api(http, service, OPEN)


@pytest.mark.parametrize(
    ("host", "key", "refused"),
    [("0.0.0.0", None, True), ("10.0.0.5", None, True), ("127.0.0.1", None, False), ("0.0.0.0", "key", False)],
)
def test_grpc_that_anyone_reaches_asks_for_the_key(
    host: str, key: str | None, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ClusterConfig(grpc_host=host, cluster_key=key)
    if refused:
        with pytest.raises(ValueError, match=rf"--grpc-host {host}.*MILLRACE_CLUSTER_KEY.*--insecure"):
            check_grpc(cluster, CLOSED)
    else:
        check_grpc(cluster, CLOSED)
    with caplog.at_level(logging.WARNING):
        check_grpc(cluster, OPEN)
    assert ("answers anyone" in caplog.text) == refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--host", "0.0.0.0"], "MILLRACE_API_KEY"),
        (["serve", "--mixed", "1", "--host", "0.0.0.0"], "MILLRACE_API_KEY"),
        (["router", "--host", "0.0.0.0"], "MILLRACE_API_KEY"),
        (["router", "--grpc-host", "0.0.0.0"], "MILLRACE_CLUSTER_KEY"),
        (["prefill", "--grpc-host", "0.0.0.0"], "MILLRACE_CLUSTER_KEY"),
        (["decode", "--grpc-host", "0.0.0.0"], "MILLRACE_CLUSTER_KEY"),
        (["mixed", "--grpc-host", "0.0.0.0"], "MILLRACE_CLUSTER_KEY"),
        (["kvcache", "--grpc-host", "0.0.0.0"], "MILLRACE_CLUSTER_KEY"),
    ],
)
def test_every_command_refuses_before_it_loads_anything(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MILLRACE_API_KEY", "MILLRACE_CLUSTER_KEY", "VLLM_API_KEY", "MILLRACE_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("deploy.cli.leave_at_once_on_signals", lambda: None)  # it would hold for all tests after this
    model = [] if arguments[0] == "kvcache" else [str(tmp_path / "no-model")]
    assert main([arguments[0], *model, *arguments[1:]]) == 2
    assert told in capsys.readouterr().err
