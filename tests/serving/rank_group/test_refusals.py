"""What cannot be spread over ranks is refused before a process starts, with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.cli import main
from deploy.worker.model_cache import check_model, load_from
from serving.checkpoint.checkpoint import SafetensorsFolder
from serving.config import ModelConfig
from serving.rank_group import device_leader, layout_leader, leader
from tests.serving.model.oracle import build, configs, save
from tests.tiny import tiny_llama


def test_ranks_that_copy_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--enable-expert-parallel asks for.*--mixed 2"):
        check_model(tmp_path, ModelConfig(data_parallel_size=2))


def test_a_dense_model_is_refused_by_router_and_worker(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(data_parallel_size=2, enable_expert_parallel=True)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=r"no experts to spread.*--mixed 2"):
            check(dense, config)


def test_one_rank_is_a_worker_as_any(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(enable_expert_parallel=True)
    check_model(dense, config)
    assert load_from(dense, config).spec.moe is None


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("dense"), layers=3, hidden=48, heads=6, kv_heads=3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tensor_parallel_size": 7}, "-parallel-size 7: .* 3 key-value heads evenly; choose 6 or less"),
        ({"tensor_parallel_size": 5}, "choose 3 or less"),
        ({"tensor_parallel_size": 2**31}, "choose 6 or less"),
        ({"pipeline_parallel_size": 4}, "-parallel-size 4: the model has 3 layers; choose 3 or less"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, "choose 3 or less"),
        ({"prefill_context_parallel_size": 4}, "-context-parallel-size 4: .*; choose 3 or less"),
        (
            {"tensor_parallel_size": 3, "prefill_context_parallel_size": 3},
            "-context-parallel-size 3: .*; choose 2 or less",
        ),
        ({"tensor_parallel_size": 2, "device": "meta"}, "a CUDA device each, or share a CPU, and no meta"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "millrace quantize"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "leave out one of the two"),
        ({"pipeline_parallel_size": 2, "enable_expert_parallel": True}, "leave out one of the two"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_one_is_started(
    settings: dict[str, Any], told: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_leader, "LayoutGroup", _not_to_be_started)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=told):
            check(dense, ModelConfig(**settings))


@pytest.mark.parametrize(
    ("gpus", "settings", "told"),
    [
        (1, {"tensor_parallel_size": 2}, "has a GPU of its own, and this worker sees 1; see CUDA_VISIBLE_DEVICES"),
        (
            4,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "choose --tensor-parallel-size 4, or --device cpu",
        ),
        (2, {"prefill_context_parallel_size": 2}, "choose --tensor-parallel-size 2"),
        (8, {"tensor_parallel_size": 7}, "choose 6 or less"),
        (2, {"tensor_parallel_size": 2, "quantization": "int8"}, "millrace quantize"),
        (2, {"tensor_parallel_size": 2, "device": "cuda:1"}, "cuda:1: each rank has a GPU of its own.*name no single"),
    ],
)
def test_what_ranks_on_gpus_cannot_share_is_refused_before_one_is_started(
    gpus: int, settings: dict[str, Any], told: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_leader, "GroupOnDevices", _not_to_be_started)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=told):
            check(dense, ModelConfig(**({"device": "cuda"} | settings)))
    check_model(dense, ModelConfig(device="cuda", tensor_parallel_size=min(gpus, 2)))


def test_a_role_may_have_sizes_of_its_own() -> None:
    config = ModelConfig(tensor_parallel_size=2, prefill_tensor_parallel_size=4, decode_pipeline_parallel_size=3)
    assert config.of("prefill").rank_flags == "--tensor-parallel-size 4"
    assert config.of("decode").rank_flags == "--tensor-parallel-size 2 --pipeline-parallel-size 3"
    assert config.of("mixed").rank_flags == "--tensor-parallel-size 2"
    prompts = ModelConfig(prefill_context_parallel_size=2)
    assert prompts.of("mixed").rank_flags == prompts.of("prefill").rank_flags == "--prefill-context-parallel-size 2"
    assert prompts.of("decode").rank_flags == "", "its steps have no prompts to share"


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


@pytest.mark.parametrize(
    ("gpus", "settings", "told"),
    [
        (1, {}, "--data-parallel-size 2 with --device cuda: each rank has a GPU of its own, and this worker sees 1"),
        (2, {"device": "cuda:1"}, "cuda:1: each rank has a GPU of its own.*name no single"),
        (8, {"data_parallel_size": 3}, "-parallel-size 3: 3 ranks cannot share 4 attention heads.*choose 2 or less"),
        (2, {"enable_expert_parallel": False}, r"--enable-expert-parallel asks for.*--mixed 2"),
        (4, {"tensor_parallel_size": 2}, "--tensor-parallel-size 2: ranks share either.*leave out one of the two"),
        (2, {"enable_eplb": True}, "--enable-eplb with --device cuda: experts move through.*leave out one of the two"),
        (2, {"quantization": "int8"}, "millrace quantize"),
    ],
)
def test_what_ranks_with_experts_on_gpus_cannot_do_is_refused_before_one_is_started(
    gpus: int, settings: dict[str, Any], told: str, mixtral: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_leader, "GroupOnDevices", _not_to_be_started)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    asked = {"device": "cuda", "data_parallel_size": 2, "enable_expert_parallel": True}
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=told):
            check(mixtral, ModelConfig(**(asked | settings)))
    if gpus > 1:
        check_model(mixtral, ModelConfig(**asked))
        with pytest.raises(ValueError, match=r"--data-parallel-size 2: llama has no experts to spread.*--mixed 2"):
            check_model(dense, ModelConfig(**asked))


@pytest.mark.parametrize(
    "flags", [{"data_parallel_size": 2, "enable_expert_parallel": True}, {"pipeline_parallel_size": 2}]
)
def test_a_folder_of_fp8_is_refused_before_a_rank_is_started(
    flags: dict[str, Any], mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, group in ((leader, "RankGroup"), (layout_leader, "LayoutGroup")):
        monkeypatch.setattr(module, group, _not_to_be_started)
    monkeypatch.setattr(SafetensorsFolder, "float8", True)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=r"--\w+-parallel-size 2: ranks share no FP8 weights"):
            check(mixtral, ModelConfig(**flags))


def _not_to_be_started(*_: object, **__: object) -> None:
    raise AssertionError("processes are started")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--attention-backend", "triton"], "choose --attention-backend auto"),
        (["--attention-backend", "flashinfer"], "choose --attention-backend auto"),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'], "choose draft_model or ngram"),
        (["--rank-timeout", "inf"], "to 3600"),
        (["--rank-timeout", "nan"], "to 3600"),
        (["--eplb-config", "{}"], "goes with --enable-eplb"),
        (["--enable-eplb", "--eplb-config", '{"use_async": true}'], "use_async not known"),
    ],
)
@pytest.mark.parametrize(
    "ranks", [["--data-parallel-size", "2", "--enable-expert-parallel"], ["-tp", "2"], ["-pp", "2"]], ids=" ".join
)
@pytest.mark.parametrize("command", ["serve", "router", "mixed"])
def test_settings_that_clash_are_refused_before_a_model_is_looked_for(
    command: str, ranks: list[str], flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "no such model", *ranks, *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--kernels", "compiled"], "--kernels auto"), (["--deterministic"], "leave out one of the two")],
)
@pytest.mark.parametrize(
    "ranks",
    [
        ["-tp", "2"],
        ["-pp", "2"],
        ["--data-parallel-size", "2", "--enable-expert-parallel", "--device", "cuda"],
    ],
    ids=" ".join,
)
def test_ranks_that_share_layers_or_have_gpus_for_experts_compute_by_torch_alone(
    ranks: list[str], flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no such model", *ranks, *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "-tp", "2", "--host-kv-memory", "1GiB"], "--host-kv-memory: with --tensor-parallel-size 2"),
        (
            ["mixed", "--device", "cuda", "--data-parallel-size", "2", "--host-kv-memory", "1GiB"],
            "--host-kv-memory: with --data-parallel-size 2 KV lies in the KV cache alone",
        ),
        (["decode", "--decode-tensor-parallel-size", "2", "--kernels", "compiled"], "--kernels auto"),
        (["serve", "--prefill-tensor-parallel-size", "2"], "for prefill workers, of which none are started"),
        (["serve", "--mixed", "1", "--decode-pipeline-parallel-size", "2"], "for decode workers, of which none"),
        (["serve", "-tp", "0"], "must be at least 1"),
        (["serve", "--mixed", "2", "--attention-backend", "triton"], "--device is cpu, and it computes on CUDA alone"),
        (
            ["mixed", "--device", "cuda", "--kernels", "torch", "--attention-backend", "triton"],
            "--kernels torch attends",
        ),
    ],
)
def test_what_ranks_that_share_a_model_are_not_for_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = arguments
    assert main([command, "no such model", *flags]) == 2
    assert told in capsys.readouterr().err


def test_ranks_for_prompts_alone_go_with_a_layer_that_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts in decode workers, which are of one process then."""
    monkeypatch.setattr("deploy.serve.bind", lambda *_: None)
    drafting = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
    split = ("--prefill", "1", "--decode", "1", "--prefill-context-parallel-size", "2")
    assert main(["serve", "no such model", *split, *drafting]) == 2
    assert "no such model" in capsys.readouterr().err


def test_the_router_refuses_what_workers_of_one_role_cannot_share(
    dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.serve.bind", lambda *_: None)
    split = ("--prefill", "1", "--decode", "1", "--prefill-tensor-parallel-size", "7")
    assert main(["serve", str(dense), *split]) == 2
    assert "7 ranks cannot share 6 attention heads" in capsys.readouterr().err
