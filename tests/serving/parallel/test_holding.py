"""Any checkpoint loads under any layout: each rank has its part of every parameter, and has read nothing else."""

from __future__ import annotations

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
from tests.serving.model.gguf_writing import write_gguf
from tests.serving.model.oracle import COMMON, build
from tests.serving.parallel.models import written

LAYOUTS = (ParallelLayout(tensor=2, pipeline=3), ParallelLayout(tensor=2, sequence=2))
NAMES = (
    *("phi3", "gpt2", "gemma3", "gpt_oss", "mixtral_int8", "deepseek_v3_plain", "gguf_Q8_0"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llama_biased", "qwen3", "mixtral", "deepseek_v2_lite", "gguf_F32", "gguf_BF16")
    ),
)


class Models:
    """Tiny models on disk, written when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._found: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._found:
            self._found[name] = self._gguf(name) if name.startswith("gguf") else written(self.root / name, [name])[name]
        return self._found[name]

    def _gguf(self, name: str) -> Path:
        wide = build(LlamaConfig(**COMMON | {"hidden_size": 64, "intermediate_size": 128}, attention_bias=True))
        kind = gguf.GGMLQuantizationType[name.removeprefix("gguf_")]
        return write_gguf(self.root / f"{name}.gguf", wide, kind)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def shared(path: Path, layout: ParallelLayout, rank: int, dtype: str = "float32") -> LoadedModel:
    return load(path, dtype, layout=partial(hold_share, layout=layout, rank=rank))


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_has_its_part_of_each_parameter(models: Models, name: str) -> None:
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


def test_a_built_model_is_cut_as_a_loaded_one(models: Models) -> None:
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


@pytest.mark.parametrize(("name", "layout"), [("gpt2", LAYOUTS[0]), ("phi3", LAYOUTS[1]), ("gguf_F32", LAYOUTS[0])])
def test_a_rank_reads_what_it_holds_and_nothing_else(models: Models, name: str, layout: ParallelLayout) -> None:
    for rank in range(layout.ranks):
        assert shared(models[name], layout, rank).bytes_read == stored_bytes(models[name], layout, rank)


def test_of_quantized_blocks_those_are_read_that_hold_a_column(models: Models) -> None:
    file = GgufFile(models["gguf_Q8_0"])
    name, block = "blk.0.ffn_down.weight", 34  # bytes of 32 numbers and their scale
    whole = file.read(name)
    assert whole.shape == (64, 128)
    for columns, blocks in ((range(32), 1), (range(32, 96), 2), (range(43, 86), 2), (range(31, 33), 2)):
        before = file.bytes_read
        assert torch.equal(file.read_slice(name, range(3, 10), columns), whole[3:10, columns.start : columns.stop])
        assert file.bytes_read - before == 7 * blocks * block


@pytest.mark.parametrize("pipeline", [1, 3])
def test_a_bfloat16_share_keeps_its_head_wide(models: Models, pipeline: int) -> None:
    for name in ("qwen3", "phi3"):
        for rank in range(pipeline):
            model = shared(models[name], ParallelLayout(pipeline=pipeline), rank, "bfloat16").model
            if rank == pipeline - 1:
                assert model.head.weight.dtype is torch.float32
            if rank == 0:
                assert model.embed.weight.dtype is torch.bfloat16


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_read(models: Models) -> None:
    with pytest.raises(ValueError, match=r"^pipeline is 4"):
        shared(models["phi3"], ParallelLayout(pipeline=4), 0)
