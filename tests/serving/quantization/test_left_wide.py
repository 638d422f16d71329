"""`--quantization int8` on folders whose files hold some linear layers quantized already."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from serving.loader import quantize_at_load as at_load
from serving.loader.loading import load
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout
from tests.serving.model.oracle import build, configs, save
from tests.serving.quantization.test_apply import apart, logits
from tests.serving.quantization.test_folder import quantize, rotations, same


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(at_load, "calibration_tokens", lambda path, longest: [[7, 3, 90, 11, 5, 60, 2, 8] * 4])


def test_what_a_folder_has_left_wide_is_quantized_where_that_is_asked_for(tmp_path: Path) -> None:
    quantize(save(build(configs()["llama2"]), tmp_path / "source"), tmp_path / "out")
    stored, whole = load(tmp_path / "out"), load(tmp_path / "out", quantization="int8")
    wide = {name for name, module in stored.model.named_modules() if isinstance(module, nn.Linear)} - {"head"}
    assert {name.split(".", 2)[2] for name in wide} == {"mlp.gate_up", "mlp.down"}
    assert {name for name, block in rotations(whole).items() if block} == wide
    kept = [name for name, _ in stored.model.named_parameters() if name.endswith(("qkv.weight", "o.weight", "o.scale"))]
    assert all(torch.equal(stored.model.get_parameter(name), whole.model.get_parameter(name)) for name in kept)
    assert apart(logits(stored.model), logits(whole.model)) < 0.05
    assert whole.fingerprint != stored.fingerprint
    same(whole, load(tmp_path / "out", quantization="int8"))  # with scales that were kept, layer by layer


def test_ranks_say_that_they_compress_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantize(save(build(configs()["llama2"]), tmp_path / "source"), tmp_path / "out")
    share_of = partial(hold_share, layout=ParallelLayout(tensor=2), rank=0)
    share = load(tmp_path / "out", quantization="int8", layout=share_of)
    assert any(isinstance(module, nn.Linear) for name, module in share.model.named_modules() if name != "head")
    assert "compresses no further linear layers of ranks" in caplog.text
    caplog.clear()
    load(tmp_path / "out", layout=share_of)
    assert not caplog.text
