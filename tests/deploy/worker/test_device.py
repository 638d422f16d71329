"""A device that a worker does not have is refused by name, with what to do, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.worker.model_cache import check_device, check_model
from serving.config import ModelConfig


@pytest.mark.parametrize("name", ["nonsense", "", "cuda:x", "cuda:-1", "cpu:" + 40 * "9"])
def test_a_device_torch_does_not_know_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^--device {name}: torch knows no such device; cpu, cuda or cuda:0"):
        check_device(name)


def test_a_build_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match=r"^--device cuda:0: this build of torch has no CUDA"):
        check_model(tmp_path, ModelConfig(device="cuda:0"))


@pytest.mark.parametrize(
    ("name", "gpus", "told"),
    [("cuda", 0, "torch sees no GPU"), ("cuda:0", 0, "torch sees no GPU"), ("cuda:2", 2, "torch sees 2 GPUs")],
)
def test_a_gpu_that_is_not_there_is_named(name: str, gpus: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"^--device {name}: {told}; see nvidia-smi and CUDA_VISIBLE_DEVICES"):
        check_device(name)


def test_a_device_that_is_there_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
