"""Reads one parameter of a decoder out of the tensors of a checkpoint that it is stacked from, or a rank's part of it.

It knows shapes, and how checkpoints order rows; not which parameter goes where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from serving.checkpoint.checkpoint import Checkpoint
from serving.checkpoint.cuts import Cut, overlaps
from serving.checkpoint.weights import Part


def fill_parameter(name: str, value: Tensor, parts: Sequence[Part], checkpoint: Checkpoint, cut: Cut) -> None:
    """Copy to `value`, the parameter `name`, the rows of its parts that `cut` has, in its order of columns.

    Raises ValueError where the tensors do not fit the parameter.
    """
    row = first = 0  # of the value, of the whole parameter
    for part in parts:
        if part.name in checkpoint.int8_names and value.dtype.itemsize > 1:  # its scales would be left out
            kind = "FP8" if checkpoint.float8 else "INT8"
            raise ValueError(f"{part.name} is {kind}, which is not supported for this tensor; keep it in a wider type")
        stored = checkpoint.shape(part.name)
        count = stored[-1] if part.transposed else stored[0]
        for tensor in _pieces(checkpoint, part, stored, first, cut):
            if value.dim() == 1 and tensor.shape[1:] == (1,):  # scales, which are stored as a column
                tensor = tensor[:, 0]
            if tensor.shape[1:] != value.shape[1:] or row + len(tensor) > len(value):
                raise ValueError(f"{part.name} has shape {list(stored)}, which does not fit {name} {list(value.shape)}")
            value[row : row + len(tensor)].copy_(tensor)
            row += len(tensor)
        first += count
    if row != len(value):
        raise ValueError(f"{' + '.join(part.name for part in parts)} give {row} rows, {name} needs {len(value)}")


def _pieces(checkpoint: Checkpoint, part: Part, stored: tuple[int, ...], first: int, cut: Cut) -> Iterator[Tensor]:
    """What `cut` has of the part, whose first row is the whole parameter's row `first`."""
    if cut == Cut():
        yield _in_order(checkpoint.read(part.name), part, part.paired_heads)
        return
    count = stored[-1] if part.transposed else stored[0]
    columns = cut.columns if len(stored) > 1 else None
    for rows in [range(count)] if cut.rows is None else overlaps(cut.rows, first, count):
        if part.transposed:
            every = range(stored[0]) if columns is None else columns
            read = checkpoint.read_slice(part.name, every, rows)
        else:
            read = checkpoint.read_slice(part.name, rows, columns)
        heads = len(rows) * part.paired_heads // count
        assert heads * count == len(rows) * part.paired_heads, "a head is cut in two"
        yield _in_order(read, part, heads)


def _in_order(tensor: Tensor, part: Part, heads: int) -> Tensor:
    """The values as [out, in] rows, in each of `heads` the halves of rope pairs apart, as the decoder has them."""
    if part.transposed:
        tensor = tensor.t()
    if not heads:
        return tensor
    by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
    count = part.paired_rows or by_head.shape[1]
    alone, paired = torch.split(by_head, [by_head.shape[1] - count, count], dim=1)
    halves = paired.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(paired.shape)
    return torch.cat((alone, halves), dim=1).reshape(tensor.shape)
