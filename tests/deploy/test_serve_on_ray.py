"""What the services of a deployment on Ray are told and reserve; errors of those who have no Ray or no cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.children import placed
from deploy.on_ray.layout import RayGroup
from deploy.placement.given import placed_settings
from deploy.placement.reader import read_placement
from deploy.serve_on_ray import model_words, ray_groups


def groups_of(text: str) -> dict[str, RayGroup]:
    plan = read_placement(text)
    children = placed(plan, lambda group: placed_settings({}, plan, group))
    found = ray_groups(placed_settings({}, plan, plan.router), children, plan.ray)
    return {group.name: group for group in found}


def test_groups_reserve_what_the_file_says_or_their_settings() -> None:
    groups = groups_of("""
[[workers]]
role = "prefill"
count = 2
threads = 3
[[workers]]
role = "decode"
device = "cuda"
tensor_parallel_size = 2
[kvcache]
disk = "/disk"
[ray.decode]
cpus = 4
memory = "1GiB"
resources = { a = 1 }
""")
    assert (groups["prefill"].count, groups["prefill"].threads, groups["prefill"].bundle) == (2, 3, {"CPU": 3})
    assert groups["decode"].bundle == {"CPU": 4, "GPU": 2, "memory": 1 << 30, "a": 1.0}
    assert groups["decode"].threads == 4
    assert (groups["kvcache"].bundle, groups["kvcache"].disk) == ({"CPU": 1}, "/disk")
    assert groups["prefill"].command[0] == "prefill"
    assert not any(word.startswith(("--threads", "--disk")) for word in groups["prefill"].command)


def test_workers_of_other_nodes_are_told_the_model_as_they_find_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    assert model_words(None) == ()
    assert model_words("owner/name") == ("owner/name",)
    assert model_words("own") == (str(tmp_path / "own"),)


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert cli.main(["scale", "prefill=2"]) == 2
    assert "pip install 'millrace[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--on", "ray"], "--on ray needs workers"),
        (["serve", "--address", "auto"], "with --on ray"),
        (["serve", "--mixed", "1", "--on", "ray", "--address", "ray://a:1"], "run millrace on a node of the cluster"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ray://a:1" in arguments:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'millrace[ray]'")
    monkeypatch.setattr("deploy.cli.leave_at_once_on_signals", lambda: None)
    monkeypatch.setattr("deploy.cli.setup_logging", lambda *_: None)
    assert cli.main(arguments) == 2
    assert told in capsys.readouterr().err
