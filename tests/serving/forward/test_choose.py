"""Which kernels a worker on another device than the CPU gets, with what graphs, and what it says when it gets none."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving.config import EngineConfig
from serving.forward import choose as choosing
from serving.forward.choose import make_forward
from serving.forward.cuda_graphs import GraphSizes
from serving.forward.forward import EagerForward
from serving.forward.mixed_graphs import MixedSizes
from serving.loader.loading import LoadedModel
from serving.model.decoder import Decoder
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=32,
    hidden=16,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=16,
    intermediate=16,
    max_position=64,
    norm_eps=1e-5,
    rope=Rope(frequencies=default_frequencies(10000.0, 16)),
)


@pytest.fixture
def model() -> LoadedModel:
    with torch.device("meta"):
        decoder = Decoder(SPEC)
    return LoadedModel(model=decoder, spec=SPEC, dtype="float32", fingerprint="", path=Path())


class OnCuda(DeviceKV):
    """Planes that claim to be on a GPU."""

    def __init__(self) -> None:
        super().__init__(SPEC.kv_layers("float32"), 4, 16, "meta")

        class Plane:
            device = torch.device("cuda")

        self.planes = [(Plane(), Plane())]  # type: ignore[list-item]


@dataclass
class Scripted:
    """What stands in for serving.forward.triton_forward, which a machine without triton cannot import."""

    reason: str | None = None
    made: list[Any] = field(default_factory=list)

    def module(self) -> ModuleType:
        module, script = ModuleType("serving.forward.triton_forward"), self

        class TritonForward:
            form = "triton"

            def __init__(self, _model: Decoder, _planes: object, max_position: int) -> None:
                self.max_position = max_position
                script.made.append(self)

            def choose_prompts(self, backend: str, most_tokens: int) -> None:
                self.attention = backend, most_tokens

            def warm_up(self, most_tokens: int, graphs: GraphSizes | None) -> None:
                self.most_tokens, self.graphs = most_tokens, graphs

        module.supports = lambda *_: script.reason  # type: ignore[attr-defined]
        module.TritonForward = TritonForward  # type: ignore[attr-defined]
        return module


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    import serving.forward

    script = Scripted()
    module = script.module()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(serving.forward, "triton_forward", module, raising=False)
    monkeypatch.setattr(choosing, "find_spec", lambda _name: object())
    return script


def test_cuda_gets_triton_with_graphs_of_what_the_worker_may_hold(model: LoadedModel, scripted: Scripted) -> None:
    made = make_forward(model, OnCuda().planes, EngineConfig(max_num_seqs=5, max_num_batched_tokens=48), 600)
    assert scripted.made == [made]
    assert (made.max_position, made.most_tokens) == (600, 48)
    assert made.attention == ("auto", 48)
    mixed = MixedSizes(sequences=(5,), contexts=(600,), tokens=(48,))
    assert made.graphs == GraphSizes(sequences=(1, 2, 4, 5), contexts=(600,), mixed=mixed)


def test_graphs_can_be_left_out(model: LoadedModel, scripted: Scripted) -> None:
    assert make_forward(model, OnCuda().planes, EngineConfig(cuda_graphs=False), 600).graphs is None


def test_what_triton_cannot_do_is_done_by_torch(
    model: LoadedModel, scripted: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choosing, "EagerForward", lambda _model, _planes: "torch")
    scripted.reason = "it is too wide"
    with caplog.at_level(logging.INFO):
        assert make_forward(model, OnCuda().planes, EngineConfig(), 64) == "torch"
    assert "computing with torch: it is too wide" in caplog.text
    with pytest.raises(ValueError, match="--kernels compiled: it is too wide"):
        make_forward(model, OnCuda().planes, EngineConfig(kernels="compiled"), 64)
    scripted.reason = None
    with pytest.raises(ValueError, match=r"--deterministic needs .* may depend on its batch"):
        make_forward(model, OnCuda().planes, EngineConfig(deterministic=True), 64)
    monkeypatch.setattr(choosing, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        make_forward(model, OnCuda().planes, EngineConfig(kernels="compiled"), 64)
    assert scripted.made == []


def test_a_demanded_attention_backend_is_had_or_told_of(
    model: LoadedModel, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    demanded = EngineConfig(attention_backend="flashinfer", max_num_batched_tokens=48)
    assert make_forward(model, OnCuda().planes, demanded, 600).attention == ("flashinfer", 48)
    scripted.reason = "it is too wide"
    with pytest.raises(ValueError, match="--attention-backend flashinfer: it is too wide; choose --attention-backend"):
        make_forward(model, OnCuda().planes, demanded, 600)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_an_attention_backend_that_nothing_computes_with_is_an_error(
    model: LoadedModel, scripted: Scripted, backend: str
) -> None:
    """Before: triton was let pass on a CPU and by torch, and auto advised where --kernels torch stood in the way."""
    demanded = EngineConfig(attention_backend=backend)
    on_cpu = DeviceKV(SPEC.kv_layers("float32"), 4, 16).planes
    for kernels in ("auto", "torch", "compiled"):
        with pytest.raises(ValueError, match=f"--attention-backend {backend}: it computes on CUDA alone; choose --att"):
            make_forward(model, on_cpu, replace(demanded, kernels=kernels), 64)
    with pytest.raises(ValueError) as told:
        make_forward(model, OnCuda().planes, replace(demanded, kernels="torch"), 600)
    assert str(told.value) == (
        f"--attention-backend {backend}: --kernels torch attends by torch; choose --kernels auto, or"
        " --attention-backend auto"
    )
    scripted.reason = "it is too wide"
    with pytest.raises(ValueError, match=f"--attention-backend {backend}: it is too wide; choose --attention-backend"):
        make_forward(model, OnCuda().planes, demanded, 600)


def test_other_devices_have_torch(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    device_kv = DeviceKV(SPEC.kv_layers("float32"), 4, 16, "meta")
    with caplog.at_level(logging.INFO):
        assert isinstance(make_forward(model, device_kv.planes, EngineConfig(), 64), EagerForward)
    assert "no kernels for meta devices" in caplog.text
