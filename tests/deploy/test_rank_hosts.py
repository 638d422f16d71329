"""Flags of ranks on several hosts: what cannot be is refused before anything is loaded, with what to do instead."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.runtime.open_doors import check_rank_hosts
from deploy.worker import rank_hosts
from deploy.worker.rank_hosts import RankHosts, identity_of
from serving.config import ClusterConfig, ModelConfig
from serving.options import ConfigError
from serving.rank_group.host_door import HostSecurity
from serving.rank_hosts_config import RankHostsConfig
from serving.security_config import SecurityConfig
from tests.serving.model.oracle import build, configs, save

EXPERTS = ("--data-parallel-size", "4", "--enable-expert-parallel")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--headless",), "say which ranks this host has"),
        (("--data-parallel-start-rank", "2"), "give it --headless too"),
        (("--data-parallel-size-local", "5"), "there are 4 ranks of --data-parallel-size 4"),
        (
            ("--headless", "--data-parallel-start-rank", "3", "--data-parallel-size-local", "2"),
            "from rank 3 on there are 1",
        ),
        (("--headless", "--data-parallel-start-rank", "4"), "from rank 4 on there are 0"),
        (("--headless", "--data-parallel-start-rank", "0"), "at least 1"),
        (("--data-parallel-size-local", "2", "--enable-eplb"), "no memory is shared by several hosts"),
        (("--data-parallel-size-local", "2", "--device", "cuda"), "compute on CPUs"),
        (("--data-parallel-size-local", "2", "--prefill", "1", "--decode", "1"), "start one here"),
        (("--data-parallel-size-local", "2", "--data-parallel-rpc-port", "0"), "from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["serve", "no-such-model", *EXPERTS, *flags]) == 2
    except SystemExit as left:  # of the flag's own parser
        assert left.code == 2
    assert told in capsys.readouterr().err


def test_dense_ranks_and_routers_have_no_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--data-parallel-size", "2", "--data-parallel-size-local", "1"]) == 2
    assert "--enable-expert-parallel" in capsys.readouterr().err
    assert main(["router", "m", *EXPERTS, "--headless", "--data-parallel-start-rank", "1"]) == 2
    assert "a router none" in capsys.readouterr().err


def test_a_placement_starts_no_host_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placement.toml"
    file.write_text('model = "m"\n[[workers]]\nrole = "mixed"\n')
    assert main(["serve", "--placement", str(file), "--headless"]) == 2
    assert "leave out one of the two" in capsys.readouterr().err


def test_short_names_of_vllm_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "-dp", "2", "--enable-expert-parallel", "-dpl", "3", "-dpa", "::1", "-dpp", "99"]) == 2
    assert "--data-parallel-size-local 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "local", "spans", "hosted"),
    [
        ({}, 4, False, (0, 4)),
        ({"data_parallel_size_local": 4}, 4, False, (0, 4)),
        ({"data_parallel_size_local": 1}, 1, True, (0, 1)),
        ({"headless": True, "data_parallel_start_rank": 1}, 4, True, (1, 3)),
        ({"headless": True, "data_parallel_start_rank": 1, "data_parallel_size_local": 2}, 2, True, (1, 2)),
    ],
)
def test_which_ranks_are_where(settings: dict[str, Any], local: int, spans: bool, hosted: tuple[int, int]) -> None:
    config = RankHostsConfig(**settings)
    config.check(4, spread=True, balanced=False)
    assert (config.local(4), config.spans_hosts(4), config.hosted(4)) == (local, spans, hosted)


def test_nobody_listens_beyond_loopback_without_a_key() -> None:
    hosts = RankHostsConfig(data_parallel_address="0.0.0.0", data_parallel_size_local=1)
    with pytest.raises(ValueError, match="MILLRACE_CLUSTER_KEY"):
        check_rank_hosts(hosts, ClusterConfig(), SecurityConfig())
    check_rank_hosts(hosts, ClusterConfig(cluster_key="key"), SecurityConfig())
    check_rank_hosts(hosts, ClusterConfig(), SecurityConfig(grpc_tls_ca="ca.pem"))
    check_rank_hosts(hosts, ClusterConfig(), SecurityConfig(insecure=True))
    check_rank_hosts(RankHostsConfig(), ClusterConfig(), SecurityConfig())


def test_a_port_that_is_taken_is_told_of(tmp_path: Path) -> None:
    model = save(build(configs()["mixtral"]), tmp_path / "mixtral")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        hosts = RankHosts(1, "127.0.0.1", port, HostSecurity())
        with pytest.raises(ValueError, match=f"--data-parallel-rpc-port {port}: cannot listen there"):
            hosts.lobby(model, ModelConfig(data_parallel_size=2))


def test_a_host_tells_which_kernels_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = save(build(configs()["mixtral"]), tmp_path / "mixtral"), ModelConfig(data_parallel_size=2)
    before = identity_of(model, config)
    assert identity_of(model, config) == before
    monkeypatch.setattr(rank_hosts, "sources_digest", lambda: "of another build")
    assert identity_of(model, config) == replace(before, kernels="of another build") != before


def test_every_refusal_names_its_setting() -> None:
    with pytest.raises(ConfigError) as told:
        RankHostsConfig(headless=True).check(2, spread=True, balanced=False)
    assert told.value.param == "headless"
