"""`millrace serve --placement`: what each child is told, and which flags cannot be given beside it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from deploy import cli
from deploy.children import child_specs, node_specs, placed
from deploy.cli import main
from deploy.placement.given import check_plan, placed_settings
from deploy.placement.reader import read_placement
from deploy.runtime.settings import read_settings
from serving.options import ConfigError
from tests.deploy.conftest import Started

PLACEMENT = """
model = "some/model"
[common]
block_size = 8
heartbeat_interval = 0.5
[router]
port = 9000
[[workers]]
role = "prefill"
count = 2
name = "big"
kv_cache_memory = "1MiB"
[[workers]]
role = "decode"
threads = 3
block_size = 32
[kvcache]
count = 2
ram = "1MiB"
disk = "kv"
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "placement.toml").write_text(PLACEMENT)
    return str(tmp_path / "placement.toml")


def test_the_router_is_told_what_the_file_says_and_flags_go_first(
    path: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--placement", path]) == 0
    made = started.settings
    assert (made.model, made.http.port, made.placement.heartbeat_interval) == ("some/model", 9000, 0.5)
    monkeypatch.setenv("MILLRACE_PORT", "9001")
    assert main(["serve", "other/model", "--placement", path, "--heartbeat-interval", "0.25"]) == 0
    made = started.settings
    assert (made.model, made.http.port, made.placement.heartbeat_interval) == ("other/model", 9001, 0.25)


def test_every_child_is_told_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    plan = read_placement(PLACEMENT)
    children = placed(plan, lambda group: placed_settings({"placement": plan}, plan, group))
    specs = child_specs(Path("model"), children.workers, "127.0.0.1:7")
    assert [(spec.name, spec.arguments[0]) for spec in specs] == [
        ("big-0", "prefill"), ("big-1", "prefill"), ("decode-0", "decode"),
    ]  # fmt: skip
    first, _, last = (spec.arguments for spec in specs)
    assert {"--block-size=8", f"--kv-cache-memory={1 << 20}"} <= {*first}
    assert {"--block-size=32", "--gpu-memory-utilization=0.9"} <= {*last}
    assert not any(word.startswith("--kv-cache-memory") for word in last)
    assert [arguments[arguments.index("--threads") + 1] for arguments in (first, last)] == ["2", "3"]
    assert all(spec.arguments[spec.arguments.index("--heartbeat-interval") + 1] == "0.5" for spec in specs)
    assert children.node_settings is not None
    nodes = node_specs(children.nodes, "127.0.0.1:7", children.node_settings)
    assert [spec.name for spec in nodes] == ["kvcache-0", "kvcache-1"]
    assert {f"--ram={1 << 20}", "--disk=kv/kvcache-1"} <= {*nodes[1].arguments}


def test_cores_are_shared_by_those_that_are_given_the_same() -> None:
    text = "[common]\ncpus = '0-3'\n[[workers]]\nrole = 'prefill'\n[[workers]]\nrole = 'decode'\n"
    text += "[[workers]]\nrole = 'mixed'\ncount = 2\ncpus = '4-5'\n"
    plan = read_placement(text)
    children = placed(plan, lambda group: placed_settings({"placement": plan}, plan, group))
    specs = child_specs(Path("model"), children.workers, "127.0.0.1:7")
    assert [spec.arguments[spec.arguments.index("--cpus") + 1] for spec in specs] == ["0,1", "2,3", "4", "5"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prefill", "2"], "--prefill and --placement"),
        (["--kvcache", "1"], "--kvcache and --placement"),
        (["--config", "/some.toml"], "--config and --placement"),
        (["--placement", "/nowhere.toml"], "--placement /nowhere.toml"),
    ],
)
def test_what_cannot_be_meant_is_told(
    path: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    assert main(["serve", "--placement", path, *flags]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


RANKS = "[[workers]]\nrole = 'mixed'\ndata_parallel_size = 2\nenable_expert_parallel = true\n"


def test_how_experts_move_is_checked_with_the_group_whose_experts_they_are(tmp_path: Path, started: Started) -> None:
    """And not with the router, which has no ranks."""
    (tmp_path / "ranks.toml").write_text(RANKS)
    assert main(["serve", "--placement", str(tmp_path / "ranks.toml"), "--enable-eplb"]) == 0
    plan, given = started.given["placement"], started.given
    [group] = placed(plan, lambda group: placed_settings(given, plan, group)).workers
    assert group.settings.model_config.eplb() is not None


def test_a_worker_of_a_placement_waits_for_hosts_that_are_started_elsewhere(tmp_path: Path, started: Started) -> None:
    (tmp_path / "ranks.toml").write_text(RANKS + "data_parallel_size_local = 1\ndata_parallel_rpc_port = 7\n")
    assert main(["serve", "--placement", str(tmp_path / "ranks.toml")]) == 0
    plan, given = started.given["placement"], started.given
    [group] = placed(plan, lambda group: placed_settings(given, plan, group)).workers
    [spec] = child_specs(Path("model"), [group], "127.0.0.1:7")
    read = read_settings(vars(cli.make_parser().parse_args(spec.arguments)))
    assert read.hosts == group.settings.hosts
    assert (read.hosts.local(2), read.hosts.data_parallel_rpc_port) == (1, 7)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{RANKS}count = 2\ndata_parallel_size_local = 1", "2 are to be started"),
        (f"{RANKS}data_parallel_size_local = 3", "there are 2 ranks"),
        ("[[workers]]\nrole = 'mixed'\ndata_parallel_size = 2\ndata_parallel_size_local = 1", "hold experts"),
    ],
)
def test_hosts_that_cannot_be_are_refused_before_a_worker_is_started(text: str, told: str) -> None:
    plan = read_placement(text)
    with pytest.raises(ValueError, match=f"mixed: .*{told}"):
        placed(plan, lambda group: placed_settings({"placement": plan}, plan, group))
    with pytest.raises(ValueError, match=told):
        check_plan(plan)


@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        ("", "", True),
        ("data_parallel_address = '10.0.0.1'", "data_parallel_address = '0.0.0.0'", True),
        ("data_parallel_address = '10.0.0.1'", "data_parallel_address = '10.0.0.2'", False),
        ("data_parallel_rpc_port = 7", "", False),
        ("data_parallel_rpc_port = 7", "data_parallel_rpc_port = 7", True),
        ("data_parallel_size_local = 2", "", False),
    ],
)
def test_two_workers_that_wait_for_hosts_at_one_port_are_refused(one: str, other: str, refused: bool) -> None:
    """On this machine the second could not listen, and in Compose not publish it; pods have an address each."""
    text = "".join(
        f"{RANKS}name = '{name}'\n{'' if 'local' in more else 'data_parallel_size_local = 1'}\n{more}\n"
        for name, more in (("one", one), ("two", other))
    )
    plan = read_placement(text)
    check_plan(plan, apart=True)
    for check in (
        lambda: check_plan(plan),
        lambda: placed(plan, lambda group: placed_settings({"placement": plan}, plan, group)),
    ):
        told = pytest.raises(ValueError, match=r"one and two both wait .*data_parallel_rpc_port")
        with told if refused else nullcontext():
            check()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{RANKS}enable_eplb = true\neplb_config = '{{}}, no'", "no JSON object"),
        ("[[workers]]\nrole = 'mixed'\nenable_eplb = true", "choose --enable-expert-parallel"),
    ],
)
def test_experts_that_cannot_move_so_are_refused_before_a_worker_is_started(text: str, told: str) -> None:
    plan = read_placement(text)
    with pytest.raises((ConfigError, ValueError), match=told):
        placed(plan, lambda group: placed_settings({"placement": plan}, plan, group))


def test_a_node_of_the_pool_takes_no_offence_at_what_workers_are_told(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the environment of who starts it, and none of the workers' flags."""
    monkeypatch.setenv("MILLRACE_ENABLE_EPLB", "1")
    assert main(["kvcache"]) == 0
