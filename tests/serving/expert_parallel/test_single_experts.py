"""Single experts read from a checkpoint are those of the whole model, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serving.checkpoint.checkpoint import SafetensorsFolder
from serving.loader.experts import CheckpointExperts
from serving.loader.loading import load
from serving.model.moe import MoeMlp
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.folder import write_model
from serving.quantization.scheme import Int8Scheme
from tests.serving.expert_parallel.recovering import write_mixture


def quantized(folder: Path, out: Path) -> Path:
    model, scheme = load(folder, "float32").model, Int8Scheme()
    apply_scales(model, scheme, find_scales(model, scheme, None))
    out.mkdir()
    write_model(model, json.loads((folder / "config.json").read_text()), out)
    return out


@pytest.mark.parametrize(("dtype", "int8"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_an_expert_is_read_alone(tmp_path: Path, dtype: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mixture(tmp_path / "mixtral")
    if int8:
        folder = quantized(folder, tmp_path / "int8")
    whole = load(folder, dtype).model
    read: list[str] = []
    reading = SafetensorsFolder.read

    def noted(self: SafetensorsFolder, name: str) -> torch.Tensor:
        read.append(name)
        return reading(self, name)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    expert = CheckpointExperts(folder, dtype)(1, 3)
    assert read and all(".layers.1." in name and ".experts.3." in name for name in read)
    mlp = whole.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    wanted = mlp.experts[3]
    assert [type(module) for module in expert.modules()] == [type(module) for module in wanted.modules()]
    assert dict(expert.named_parameters()).keys() == dict(wanted.named_parameters()).keys()
    for name, parameter in expert.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(name))
        assert parameter.dtype == wanted.get_parameter(name).dtype
