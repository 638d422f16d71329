"""Each process on a GPU sees that one alone: the children of a front by their environments, no device needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.children import WorkerGroup, child_specs
from deploy.control.below import ChildProcesses
from deploy.runtime.devices import VISIBLE, device_of, use_device, visible_devices
from deploy.runtime.supervisor import ChildSpec, Supervisor
from serving.config import EngineConfig, ModelConfig
from serving.messages import Role
from tests.deploy.test_cli import settings_of


def groups(*devices: tuple[Role, int, str]) -> list[WorkerGroup]:
    made = []
    for role, count, device in devices:
        own = settings_of(model_config=ModelConfig(device=device))
        made.append(WorkerGroup(name=role, role=role, count=count, settings=own))
    return made


def told(specs: list[ChildSpec]) -> list[tuple[str, str | None]]:
    """The device that each child's flags say at last, and the GPU it sees."""
    found = []
    for spec in specs:
        flags = " ".join(spec.arguments).replace("--device=", "--device ").split()
        last = max(place for place, word in enumerate(flags) if word == "--device")
        found.append((flags[last + 1], spec.environ.get(VISIBLE)))
    return found


def test_children_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4, GPU-abc,6")
    specs = child_specs(Path("m"), groups((Role.PREFILL, 2, "cuda"), (Role.DECODE, 2, "cuda")), "r:1")
    assert told(specs) == [("cuda", "4"), ("cuda", "GPU-abc"), ("cuda", "6"), ("cuda", "4")]


def test_a_child_has_the_gpu_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6")
    asked = (Role.PREFILL, 1, "cuda:2"), (Role.DECODE, 1, "cuda:1"), (Role.MIXED, 1, "cpu")
    assert told(child_specs(Path("m"), groups(*asked), "r:1")) == [("cuda", "6"), ("cuda", "5"), ("cpu", None)]


def test_the_gpus_that_none_was_told_are_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6")
    asked = (Role.PREFILL, 2, "cuda"), (Role.DECODE, 1, "cuda:0")
    specs = child_specs(Path("m"), groups(*asked), "r:1")
    assert told(specs) == [("cuda", "5"), ("cuda", "6"), ("cuda", "4")]
    assert not any("--kv-cache-memory" in spec.arguments for spec in specs), "each has a GPU of its own"


def test_workers_that_share_a_gpu_have_kv_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its share the first would leave the second none, and would measure what that takes while it starts."""
    monkeypatch.setenv(VISIBLE, "4,5")
    made = groups((Role.PREFILL, 2, "cuda"), (Role.DECODE, 1, "cuda:0"))
    own = replace(made[1].settings, engine=EngineConfig(num_kv_blocks=9))
    specs = child_specs(Path("m"), [*made, replace(made[1], name="sized", settings=own)], "r:1")
    assert [spec.environ[VISIBLE] for spec in specs] == ["5", "5", "4", "4"]
    assert [spec.arguments[-2:] == ("--kv-cache-memory", "2GiB") for spec in specs] == [True, True, True, False]
    on_cpus = child_specs(Path("m"), groups((Role.MIXED, 2, "cpu")), "r:1")
    assert not any("--kv-cache-memory" in spec.arguments for spec in on_cpus)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_a_worker_of_several_ranks_has_a_gpu_for_each(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6,7,8")
    [group] = groups((Role.MIXED, 2, "cuda"))
    wide = replace(group.settings, model_config=ModelConfig(device="cuda", **sizes))
    made = [replace(group, settings=wide), *groups((Role.MIXED, 1, "cuda:0"))]
    specs = child_specs(Path("m"), made, "r:1")
    assert [spec.environ[VISIBLE] for spec in specs] == ["5,6", "7,8", "4"]
    assert not any("--kv-cache-memory" in spec.arguments for spec in specs)
    monkeypatch.setenv(VISIBLE, "4,5,6")
    specs = child_specs(Path("m"), made, "r:1")
    assert [spec.environ[VISIBLE] for spec in specs] == ["5,6", "4,5", "4"]
    assert all("--kv-cache-memory" in spec.arguments for spec in specs), "each shares one of its GPUs"


def test_without_gpus_children_say_themselves_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    specs = child_specs(Path("m"), groups((Role.MIXED, 1, "cuda"), (Role.MIXED, 1, "cuda:1")), "r:1")
    assert told(specs) == [("cuda", None), ("cuda:1", None)]
    assert device_of("cuda:3", [0, 1], ["0", "1"]) == ("cuda:3", {})
    assert device_of("cuda", [0, 1], ["0", "1"], 3) == ("cuda", {}), "not some of those that its ranks need"
    assert device_of("cuda:1", [0, 1], ["0", "1"], 2) == ("cuda:1", {})


def test_gpus_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "1"]
    assert visible_devices({VISIBLE: "7"}, tmp_path) == ["7"]
    assert visible_devices({VISIBLE: ""}, tmp_path) == visible_devices({VISIBLE: "-1"}, tmp_path) == []
    assert visible_devices({VISIBLE: "GPU-a5, 3,-1,1"}, tmp_path) == ["GPU-a5", "3"], "CUDA sees none behind -1"


@pytest.mark.parametrize(
    ("tool", "there"),
    [
        ("echo 'GPU 0: NVIDIA RTX A6000 (UUID: GPU-a5)'; echo 'GPU 1: NVIDIA RTX A6000 (UUID: GPU-b6)'", ["0", "1"]),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
        (None, []),
    ],
)
def test_where_all_gpus_have_one_file_the_drivers_tool_counts_them(
    tool: str | None, there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under WSL2. Before: none were found, and all workers shared the first."""
    if tool is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices({}, tmp_path) == [], "no file, no GPU: it is not asked"
    (tmp_path / "dxg").touch()
    assert visible_devices({}, tmp_path) == there
    assert visible_devices({VISIBLE: "7"}, tmp_path) == ["7"]


def test_a_process_of_its_own_sees_the_gpu_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    environ: dict[str, str] = {}
    assert use_device(ModelConfig(device="cuda:1"), environ, tmp_path).device == "cuda"
    assert environ == {VISIBLE: "1"}
    for device in ("cpu", "cuda", "cuda:2"):
        environ = {}
        assert use_device(ModelConfig(device=device), environ, tmp_path).device == device and not environ


async def test_one_more_worker_takes_the_gpu_that_the_fewest_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2")
    supervisor = Supervisor(child_specs(Path("m"), groups((Role.MIXED, 2, "cuda")), "r:1"), {})
    added: list[ChildSpec] = []
    monkeypatch.setattr(supervisor, "add", added.append)
    ChildProcesses(supervisor, 1.0).add(Role.MIXED)
    assert [child.environ[VISIBLE] for child in added] == ["2"]
