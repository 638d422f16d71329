"""A folder of random weights loads as a model of its shape, in shards or INT8, with a tokenizer of every token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.random_folder import INDEX, main, write_folder, write_tokenizer
from bench.random_model import SHAPES, llama
from serving.loader.loading import load
from serving.model.quantized_linear import QuantizedLinear

CPU = torch.device("cpu")


def test_shards_load_as_the_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "mini", "bfloat16", CPU, shard_bytes=50_000)
    files = set(json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"].values())
    assert len(files) > 2
    assert {file.name for file in (tmp_path / "model").glob("*.safetensors")} == files
    loaded = load(tmp_path / "model")
    spec = llama(**SHAPES["mini"])
    assert loaded.dtype == "bfloat16"
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab_size", "max_position", "rope"):
        assert getattr(loaded.spec, name) == getattr(spec, name)


def test_int8_is_what_quantize_writes(tmp_path: Path) -> None:
    from deploy.cli import main as millrace

    assert main([str(tmp_path / "wide"), "--shape", "mini", "--device", "cpu"]) == 0
    assert main([str(tmp_path / "int8"), "--shape", "mini", "--device", "cpu", "--weights", "quantized"]) == 0
    assert millrace(["quantize", str(tmp_path / "wide"), str(tmp_path / "quantized")]) == 0
    held = []
    for name in ("int8", "quantized"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        model = load(tmp_path / name).model
        kinds = {at: type(module).__name__ for at, module in model.named_modules()}
        held.append((config["quantization_config"], config["dtype"], kinds))
    assert held[0] == held[1]
    assert isinstance(load(tmp_path / "int8").model.get_submodule("layers.0.attention.qkv"), QuantizedLinear)


@pytest.mark.parametrize("size", [259, 384, 20_000])
def test_the_tokenizer_has_every_token_of_the_model(size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, size, 100)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    text = "The wheel turns, and 12 stones grind."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|im_end|>") == size - 1


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model"), "--shape", "tiny", "--device", "cpu"]) == 2
    assert "no room" in capsys.readouterr().err
