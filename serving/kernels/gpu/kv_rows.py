"""Rows of paged KV planes, of any number of layers, packed one after another, and back: one launch for all of them.

A table tells each plane's memory by its address, so that planes need not lie in one tensor; what they mean is not known
here. A row is what a plane keeps of a token: `runs` runs of bytes, which may lie apart.

Shapes: P planes, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel_of_any, require

# Fields of a plane in the table, int64 [planes, FIELDS]; all but the number of runs in bytes.
ADDRESS, SLOT_STRIDE, RUNS, RUN_BYTES, RUN_STRIDE, BEGIN = range(6)
FIELDS = 6

TILE = 2048  # units of one program
UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # bytes that are copied at once


@dataclass(frozen=True, slots=True)
class PackedRows:
    """`tokens` tokens of planes first..first + planes of the table, from the `offset`-th slot of their blocks on.

    `widest` are the bytes of the longest row; `unit`, of UNITS, divides every address, run and stride.
    """

    first: int
    planes: int
    widest: int
    tokens: int
    offset: int
    block_size: int
    unit: int


def gather(table: Tensor, blocks: Tensor, packed: Tensor, rows: PackedRows) -> None:
    """Copy the rows to `packed`, uint8: plane by plane, token by token. `blocks` int64 are the tokens' own, in order.

    A plane's field BEGIN says how many bytes a token has in the planes before it.
    """
    _launch(table, blocks, packed, rows, out=True)


def scatter(table: Tensor, blocks: Tensor, packed: Tensor, rows: PackedRows) -> None:
    """The inverse of `gather`."""
    _launch(table, blocks, packed, rows, out=False)


def _launch(table: Tensor, blocks: Tensor, packed: Tensor, rows: PackedRows, *, out: bool) -> None:
    require(rows.widest * rows.tokens < 2**31, "more bytes of a plane than a launch copies")
    grid = (rows.planes, triton.cdiv(rows.tokens * (rows.widest // rows.unit), TILE))
    numbers = (rows.first, rows.tokens, rows.offset, rows.block_size)
    _copy_rows[grid](table, blocks, packed, *numbers, UNIT=rows.unit, KIND=UNITS[rows.unit], OUT=out, TILE=TILE)


@kernel_of_any("first", "tokens", "offset", "block_size")
def _copy_rows(  # type: ignore[no-untyped-def]
    table,  # [P, FIELDS] int64
    blocks,  # int64
    packed,  # uint8
    first,
    tokens,
    offset,
    block_size,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (p, t) copies the t-th tile of plane first + p, whose rows are copied as one stretch of units."""
    plane = table + (first + tl.program_id(0)) * 6
    address = tl.load(plane)
    slot_stride = tl.load(plane + 1)
    runs = tl.load(plane + 2).to(tl.int32)
    run_units = (tl.load(plane + 3) // UNIT).to(tl.int32)
    run_stride = tl.load(plane + 4)
    begin = (tl.load(plane + 5) - tl.load(table + first * 6 + 5)) * tokens  # bytes of the planes before this one
    row_units = runs * run_units
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < tokens * row_units
    token = at // row_units
    within = at % row_units
    slot = offset + token
    block = tl.load(blocks + slot // block_size, mask=inside, other=0)
    row = address + (block * block_size + slot % block_size) * slot_stride
    place = row + (within // run_units).to(tl.int64) * run_stride + (within % run_units).to(tl.int64) * UNIT
    paged = place.to(tl.pointer_type(KIND))
    flat = (packed + begin).to(tl.pointer_type(KIND)) + at
    if OUT:
        tl.store(flat, tl.load(paged, mask=inside, other=0), mask=inside)
    else:
        tl.store(paged, tl.load(flat, mask=inside, other=0), mask=inside)
