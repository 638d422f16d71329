"""`millrace upcycle`: it writes a Mixtral checkpoint, here and to `transformers`, that computes the dense model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deploy import upcycle as command
from serving.loader.loading import LoadedModel, load
from serving.model.moe import MoeMlp
from serving.text.tokenizer import load_tokenizer
from tests.serving.model.gguf_writing import write_gguf
from tests.serving.model.oracle import build, configs, expected_logits, save
from tests.serving.model.paged import PagedRun
from tests.tiny import tiny_llama

TOKENS = [(13 * i * i + 5) % 90 for i in range(40)]


def upcycle(model: Path, out: Path, *flags: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(model), str(out), *flags])) == 0


def dense(name: str, folder: Path) -> Path:
    return save(build(configs()[name]), folder)


def logits(loaded: LoadedModel) -> Tensor:
    """Of all at once: torch's products of fewer than four rows have other bits, in dense layers alone."""
    run = PagedRun(loaded.model, [TOKENS], block_size=4)
    run.step({0: len(TOKENS)})
    return run.result(0)


@pytest.mark.parametrize("architecture", ["llama2", "llama3", "llama_linear", "smollm2", "mistral"])
def test_with_one_expert_a_token_the_bits_stay(architecture: str, tmp_path: Path) -> None:
    source = dense(architecture, tmp_path / "source")
    upcycle(source, tmp_path / "out", "--experts", "5", "--experts-per-token", "1")
    ours = load(tmp_path / "out")
    assert ours.spec.architecture == "mixtral" and ours.spec.moe is not None
    assert (ours.spec.moe.experts, ours.spec.moe.top_k) == (5, 1)
    assert torch.equal(logits(ours), logits(load(source)))


@pytest.mark.parametrize("architecture", ["llama3", "smollm2", "mistral"])
def test_with_more_experts_a_token_only_rounding_differs_also_to_transformers(
    architecture: str, tmp_path: Path
) -> None:
    source = dense(architecture, tmp_path / "source")
    upcycle(source, tmp_path / "out", "--experts", "6", "--experts-per-token", "3")
    expected = logits(load(source))
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, atol=2e-5, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(expected_logits(theirs, TOKENS), expected, atol=1e-4, rtol=0)


def test_routing_spreads_and_weights_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.model import moe

    seen: list[tuple[Tensor, Tensor]] = []
    route = moe.route
    monkeypatch.setattr(moe, "route", lambda *given: seen.append(route(*given)) or seen[-1])
    upcycle(dense("smollm2", tmp_path / "source"), tmp_path / "out", "--experts", "4")
    logits(load(tmp_path / "out"))
    assert [len(experts) for experts, _ in seen] == [len(TOKENS)] * 3
    for layer in range(3):
        experts, weights = (torch.cat(parts) for parts in zip(*seen[layer::3], strict=True))
        assert experts.flatten().bincount(minlength=4).min() > 0
        assert 0.5 < weights[:, 0].mean() < 0.9


def test_routers_are_a_function_of_the_seed(tmp_path: Path) -> None:
    source = dense("llama2", tmp_path / "source")
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        upcycle(source, tmp_path / out, "--experts", "3", "--seed", seed)
    a, b, c = (
        torch.cat([layer.mlp.router.weight for layer in load(tmp_path / out).model.layers if _sparse(layer.mlp)])
        for out in "abc"
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def _sparse(mlp: object) -> bool:
    assert isinstance(mlp, MoeMlp)
    return True


def test_gguf_and_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "model.gguf", build(configs()["llama2"]))
    parts = type("Parts", (), {"special_tokens": {}, "chat_templates": {}})
    parts.backend = type("Backend", (), {"to_str": staticmethod(lambda: "{}")})  # type: ignore[attr-defined]
    monkeypatch.setattr("serving.text.gguf_tokenizer.read_gguf", lambda path: parts)
    upcycle(file, tmp_path / "out", "--experts", "2", "--experts-per-token", "1", "--dtype", "float32")
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(file, "float32")))
    upcycle(file, tmp_path / "narrow", "--experts", "2")
    narrow = load(tmp_path / "narrow")
    assert narrow.dtype == "bfloat16"
    assert narrow.spec.eos_token_ids == load(file).spec.eos_token_ids


def test_the_tokenizer_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_llama(tmp_path / "source", layers=2)
    upcycle(source, tmp_path / "out", "--experts", "2")
    text = "the mill stands where the river narrows"
    assert load_tokenizer(tmp_path / "out").encode(text) == load_tokenizer(source).encode(text)
    told = capsys.readouterr().err
    assert "layer 2 of 2 is written" in told and "wrote" in told


@pytest.mark.parametrize(
    ("architecture", "flags", "message"),
    [
        ("llama2", ("--experts", "2", "--experts-per-token", "3"), "cannot take 3 of 2 experts"),
        ("llama2", ("--experts", "0"), "cannot take 2 of 0 experts"),
        ("llama_biased", ("--experts", "2"), "no place for llama with biases"),
        ("qwen2", ("--experts", "2"), "no place for qwen2"),
        ("opt", ("--experts", "2"), "no place for opt"),
        ("mixtral", ("--experts", "2"), "mixture of experts already"),
    ],
)
def test_what_will_not_do(architecture: str, flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    source = dense(architecture, tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        upcycle(source, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="exists already"):
        upcycle(source, source, "--experts", "2")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    from deploy import quantize

    source = dense("llama2", tmp_path / "source")
    parser = argparse.ArgumentParser()
    quantize.add_arguments(parser)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.loader.quantize_at_load.calibration_tokens", lambda path, longest: [TOKENS])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        quantize.run(parser.parse_args([str(source), str(tmp_path / "int8")]))
    with pytest.raises(ValueError, match="is quantized"):
        upcycle(tmp_path / "int8", tmp_path / "out", "--experts", "2")


def test_every_tensor_is_listed_once_and_a_broken_off_folder_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense("smollm2", tmp_path / "source")
    upcycle(source, tmp_path / "out", "--experts", "2")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())}
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    assert "lm_head.weight" not in index["weight_map"]

    def break_off(done: int, layers: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_tell", break_off)
    with pytest.raises(KeyboardInterrupt):
        upcycle(source, tmp_path / "half", "--experts", "2")
    with pytest.raises((ValueError, OSError)):
        load(tmp_path / "half")


def test_a_family_default_that_differs_is_spelt_out(tmp_path: Path) -> None:
    """Llama's norms have 1e-6 where a config is silent and its rope 10,000; Mixtral's 1e-5 and 1,000,000."""
    source = dense("llama2", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for silent in ("rms_norm_eps", "rope_parameters", "rope_theta", "head_dim"):
        config.pop(silent, None)
    (source / "config.json").write_text(json.dumps(config))
    upcycle(source, tmp_path / "out", "--experts", "2", "--experts-per-token", "1")
    written = PreTrainedConfig.from_pretrained(tmp_path / "out")
    assert written.rms_norm_eps == 1e-6  # type: ignore[attr-defined]
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(source)))
