"""Any checkpoint loads under any layout: each rank has its part of every parameter, and has read nothing else."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig

from serving.checkpoint.gguf_file import GgufFile
from serving.loader.loading import LoadedModel, load, open_checkpoint
from serving.model.decoder import Decoder
from serving.parallel.holding import StageLayers, hold_share, taken
from serving.parallel.layout import ParallelLayout
from serving.parallel.parameters import parameter_cut
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.folder import write_model
from serving.quantization.scheme import Int8Scheme
from tests.serving.model.gguf_writing import write_gguf
from tests.serving.model.oracle import COMMON, build, configs, save

LAYOUTS = (ParallelLayout(tensor=2, pipeline=3), ParallelLayout(tensor=2, sequence=2))
FOLDERS = ("llama_biased", "phi3", "qwen3", "gpt2", "mixtral", "deepseek_v2_lite", "deepseek_v3_plain")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: save(build(configs()[name]), root / name) for name in FOLDERS}
    model, out = load(found["mixtral"], "float32").model, root / "int8"
    out.mkdir()
    apply_scales(model, Int8Scheme(), find_scales(model, Int8Scheme(), None))
    write_model(model, json.loads((found["mixtral"] / "config.json").read_text()), out)
    wide = build(LlamaConfig(**COMMON | {"hidden_size": 64, "intermediate_size": 128}, attention_bias=True))
    found |= {"int8": out}
    for kind in ("F32", "BF16", "Q8_0"):
        path = root / f"{kind}.gguf"
        found[f"gguf_{kind}"] = write_gguf(path, wide, gguf.GGMLQuantizationType[kind])
    return found


def shared(path: Path, layout: ParallelLayout, rank: int, dtype: str = "float32") -> LoadedModel:
    return load(path, dtype, layout=partial(hold_share, layout=layout, rank=rank))


@pytest.mark.parametrize("name", [*FOLDERS, "int8", "gguf_F32", "gguf_BF16", "gguf_Q8_0"])
def test_a_rank_has_its_part_of_each_parameter(models: dict[str, Path], name: str) -> None:
    whole = load(models[name], "float32")
    every = dict(whole.model.named_parameters())
    for layout in LAYOUTS:
        for rank in range(layout.ranks):
            held = dict(shared(models[name], layout, rank).model.named_parameters())
            wanted = {one: parameter_cut(layout, whole.spec, rank, one) for one in every}
            assert set(held) == {one for one, cut in wanted.items() if cut is not None}
            for one, value in held.items():
                cut = wanted[one]
                assert cut is not None
                assert torch.equal(value, taken(every[one], cut)), one


def test_a_built_model_is_cut_as_a_loaded_one(models: dict[str, Path]) -> None:
    layout = ParallelLayout(tensor=2, pipeline=2)
    for rank in range(layout.ranks):
        built = load(models["qwen3"], "float32").model
        hold_share(built, layout, rank)
        loaded = shared(models["qwen3"], layout, rank).model
        assert isinstance(built.layers, StageLayers)
        for (name, one), (other_name, other) in zip(built.named_parameters(), loaded.named_parameters(), strict=True):
            assert name == other_name and torch.equal(one, other)


def stored_bytes(path: Path, layout: ParallelLayout, rank: int) -> int:
    """Bytes of the parameters that the rank holds, float32."""
    with torch.device("meta"):
        model = Decoder(open_checkpoint(path)[0])
    hold_share(model, layout, rank)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama_biased", "gpt2", "mixtral", "gguf_F32"])
def test_a_rank_reads_what_it_holds_and_nothing_else(
    models: dict[str, Path], name: str, layout: ParallelLayout
) -> None:
    for rank in range(layout.ranks):
        assert shared(models[name], layout, rank).bytes_read == stored_bytes(models[name], layout, rank)


def test_of_quantized_blocks_those_are_read_that_hold_a_column(models: dict[str, Path]) -> None:
    file = GgufFile(models["gguf_Q8_0"])
    name, block = "blk.0.ffn_down.weight", 34  # bytes of 32 numbers and their scale
    whole = file.read(name)
    assert whole.shape == (64, 128)
    for columns, blocks in ((range(32), 1), (range(32, 96), 2), (range(43, 86), 2), (range(31, 33), 2)):
        before = file.bytes_read
        assert torch.equal(file.read_slice(name, range(3, 10), columns), whole[3:10, columns.start : columns.stop])
        assert file.bytes_read - before == 7 * blocks * block


@pytest.mark.parametrize("pipeline", [1, 3])
def test_a_bfloat16_share_keeps_its_head_wide(models: dict[str, Path], pipeline: int) -> None:
    for name in ("qwen3", "mixtral"):
        for rank in range(pipeline):
            model = shared(models[name], ParallelLayout(pipeline=pipeline), rank, "bfloat16").model
            if rank == pipeline - 1:
                assert model.head.weight.dtype is torch.float32
            if rank == 0:
                assert model.embed.weight.dtype is torch.bfloat16


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_read(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"^pipeline is 4"):
        shared(models["llama_biased"], ParallelLayout(pipeline=4), 0)
