"""What cannot be spread over ranks is refused before a process starts, with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.worker.model_cache import check_model, load_from
from serving.config import ModelConfig
from serving.rank_group import leader
from tests.serving.model.oracle import build, configs, save
from tests.tiny import tiny_llama


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, r"--enable-expert-parallel asks for.*--mixed 2"),
        ({"enable_expert_parallel": True, "device": "cuda"}, "--device cpu alone"),
    ],
)
def test_what_ranks_are_not_for_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        check_model(tmp_path, ModelConfig(data_parallel_size=2, **settings))


def test_a_dense_model_is_refused_by_router_and_worker(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(data_parallel_size=2, enable_expert_parallel=True)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=r"no experts to spread.*--mixed 2"):
            check(dense, config)


def test_one_rank_is_a_worker_as_any(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(enable_expert_parallel=True)
    check_model(dense, config)
    assert load_from(dense, config).spec.moe is None


EXPERTS = configs()["mixtral"].num_local_experts


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data_parallel_size": EXPERTS + 1}, f"choose {EXPERTS} or less"),
        ({"data_parallel_size": 2**31}, f"choose {EXPERTS} or less"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
        (
            {"enable_eplb": True, "eplb_config": f'{{"num_redundant_experts": {EXPERTS + 1}}}'},
            f"num_redundant_experts is {EXPERTS} or less",
        ),
        ({"quantization": "int8"}, "millrace quantize"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_one_is_started(
    settings: dict[str, Any], told: str, mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "RankGroup", _not_to_be_started)
    config = ModelConfig(**({"data_parallel_size": 2, "enable_expert_parallel": True} | settings))
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=told):
            check(mixtral, config)


def _not_to_be_started(*_: object, **__: object) -> None:
    raise AssertionError("processes are started")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kernels", "compiled"], "--kernels auto"),
        (["--deterministic"], "leave out one of the two"),
        (["--rank-timeout", "inf"], "to 3600"),
        (["--rank-timeout", "nan"], "to 3600"),
        (["--eplb-config", "{}"], "goes with --enable-eplb"),
        (["--enable-eplb", "--eplb-config", '{"use_async": true}'], "use_async not known"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "router", "mixed"])
def test_settings_that_clash_are_refused_before_a_model_is_looked_for(
    command: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ["--data-parallel-size", "2", "--enable-expert-parallel"]
    assert main([command, "no such model", *ranks, *flags]) == 2
    assert told in capsys.readouterr().err
