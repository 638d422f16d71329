"""Records the inputs of each linear layer while the model reads a calibration text. It changes nothing in the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.model.decoder import Decoder
from serving.quantization.search import input_sizes

BLOCK_SIZE = 16
FIRST = 2  # tokens at the start of each sequence that are always kept: they are attention sinks with huge activations


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of one linear layer: those of some tokens [M, in], and their sizes over all tokens [2, in]; float32."""

    rows: Tensor
    sizes: Tensor


@torch.no_grad()
def activations(
    model: Decoder, sequences: Sequence[Sequence[int]], names: Sequence[str], rows: int
) -> dict[str, LayerInputs]:
    """What the modules `names` are given: the inputs of about `rows` tokens spread over the sequences, all measured.

    An expert is given some of the tokens: of those about as many. One that no token goes to is left out.
    """
    kept: dict[str, LayerInputs] = {}
    batch, planes = _one_batch(model, sequences)
    chosen = _rows(sequences, rows)

    def keep(name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        kept[name] = _recorded(x, chosen if len(x) == len(batch.tokens) else slice(0, None, max(len(x) // rows, 1)))

    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(partial(keep, name))
            stack.callback(handle.remove)
        hidden = model(batch, planes)
        if "head" in names:
            kept["head"] = _recorded(hidden, chosen)
    return kept


def _recorded(x: Tensor, chosen: Tensor | slice) -> LayerInputs:
    return LayerInputs(x[chosen].float(), input_sizes(x.float()))


def _one_batch(model: Decoder, sequences: Sequence[Sequence[int]]) -> tuple[RaggedBatch, list[tuple[Tensor, ...]]]:
    """All sequences as one batch, and KV tensors [blocks, BLOCK_SIZE, ...] that hold just them."""
    reference = model.norm.weight
    borders = list(accumulate((-(-len(sequence) // BLOCK_SIZE) for sequence in sequences), initial=0))
    kept = model.spec.kv_layers(str(reference.dtype).removeprefix("torch."))
    planes = [
        tuple(reference.new_zeros(borders[-1], BLOCK_SIZE, *plane.shape) for plane in layer.planes) for layer in kept
    ]
    batch = RaggedBatch.build(
        tokens=sequences,
        starts=[0] * len(sequences),
        block_tables=[range(first, end) for first, end in pairwise(borders)],
        block_size=BLOCK_SIZE,
        long_rope=[model.spec.rope_is_long(len(sequence)) for sequence in sequences],
        device=reference.device,
    )
    return batch, planes


def _rows(sequences: Sequence[Sequence[int]], wanted: int) -> Tensor:
    """Rows of the batch to keep: the first tokens of every sequence, and evenly spaced others."""
    lengths = [len(sequence) for sequence in sequences]
    step = max(sum(lengths) // wanted, 1)
    chosen, start = set(range(0, sum(lengths), step)), 0
    for length in lengths:
        chosen.update(range(start, start + min(FIRST, length)))
        start += length
    return torch.tensor(sorted(chosen))
