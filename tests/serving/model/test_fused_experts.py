"""Checkpoints whose tensors hold all experts of a layer, wide and in MXFP4: whole, by slices, and computed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from serving.checkpoint.checkpoint import Checkpoint
from serving.checkpoint.mxfp4 import MAGNITUDES, dequantized
from serving.loader.loading import load, open_checkpoint
from tests.serving.model.oracle import GPT_OSS, VOCAB, build, expected_logits, save
from tests.serving.model.paged import SCHEDULES, PagedRun

EXPERTS, WIDTH, HIDDEN = 6, 64, 32
SEQUENCE = [random.Random(6).randrange(VOCAB) for _ in range(31)]


def write(folder: Path, *, packed: bool) -> PreTrainedModel:
    """A tiny gpt-oss in float32, its experts in MXFP4 if `packed`; what it computes is the model's that is returned."""
    oracle = build(GptOssConfig(**GPT_OSS | {"intermediate_size": WIDTH}))
    file = save(oracle, folder) / "model.safetensors"
    if not packed:
        return oracle
    tensors, generator = load_file(file), torch.Generator().manual_seed(8)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        inputs, outputs = tensors.pop(name).shape[1:]
        blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        oracle.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


class Stored:
    def __init__(self, folder: Path, *, packed: bool) -> None:
        self.folder, self.oracle = folder, write(folder, packed=packed)
        self.checkpoint: Checkpoint = open_checkpoint(folder)[1]

    def expected(self, name: str) -> Tensor:
        """What `transformers` has of a tensor shown as one expert's."""
        before, _, (expert, projection, leaf) = *name.partition(".experts.")[:2], name.split(".")[-3:]
        fused = {"down_proj": "down_proj"}.get(projection, "gate_up_proj") + ("_bias" if leaf == "bias" else "")
        part = self.oracle.get_parameter(f"{before}.experts.{fused}").data[int(expert)]
        part = {"gate_proj": part[..., ::2], "up_proj": part[..., 1::2]}.get(projection, part)
        return part.t() if leaf == "weight" else part


@pytest.fixture(scope="module", params=[False, True], ids=["wide", "mxfp4"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("gpt_oss"), packed=request.param)


def experts_names(stored: Stored) -> list[str]:
    return sorted(name for name in stored.checkpoint.names if ".experts." in name)


def test_each_expert_has_tensors_of_its_own(stored: Stored) -> None:
    names = experts_names(stored)
    assert len(names) == 3 * EXPERTS * 3 * 2  # layers, experts, projections, weight and bias
    for name in names:
        expected, found = stored.expected(name), stored.checkpoint.read(name)
        assert stored.checkpoint.shape(name) == tuple(expected.shape) == tuple(found.shape)
        assert torch.equal(found, expected), name
    assert open_checkpoint(stored.folder)[2] == "float32"


@given(chosen=st.integers(0, 1000), ends=st.tuples(*[st.integers(0, 64)] * 4), cut=st.booleans())
def test_slices_are_parts_of_the_whole(stored: Stored, chosen: int, ends: tuple[int, ...], cut: bool) -> None:
    names = experts_names(stored)
    name = names[chosen % len(names)]
    whole = stored.checkpoint.read(name)
    first, last = sorted(min(end, len(whole)) for end in ends[:2])
    rows, columns = range(first, last), None
    if cut and whole.dim() == 2:
        columns = range(*sorted(min(end, whole.shape[1]) for end in ends[2:]))
    found = stored.checkpoint.read_slice(name, rows, columns)
    expected = whole[first:last] if columns is None else whole[first:last, columns.start : columns.stop]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_logits_equal_transformers(stored: Stored, schedule: str) -> None:
    run = PagedRun(load(stored.folder, "float32").model, [SEQUENCE], block_size=4)
    SCHEDULES[schedule](run)
    torch.testing.assert_close(run.result(0), expected_logits(stored.oracle, SEQUENCE), atol=1e-4, rtol=0)


def test_every_number_of_four_bits() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) * 16 + torch.arange(16, dtype=torch.uint8).flip(0)
    found = dequantized(blocks, torch.tensor([[128]], dtype=torch.uint8))[0]
    signed = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    assert torch.equal(found[1::2], 2 * signed) and torch.equal(found[0::2], 2 * signed.flip(0))


def test_blocks_that_do_not_fit_their_scales() -> None:
    scales = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"blocks \[2, 4, 16\] .* do not fit scales \[2, 3\]"):
        dequantized(torch.zeros(2, 4, 16, dtype=torch.uint8), scales)
