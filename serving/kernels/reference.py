"""Each operation of the decoder in plain torch: the truth that faster forms are tested against.

Knows tensors only: nothing of models, schedules or devices. Softmax, norms and rotation are computed in float32.

Shapes: T new tokens in the step, W a width, N heads, Hq query heads, Hkv key-value heads, G = Hq / Hkv,
D head dimensions, P rotated pairs of dimensions, B sequences, L tokens of context read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.batch.ragged import RaggedBatch

P = ParamSpec("P")

QUERY_BLOCK = 256  # queries attended at a time: bounds the scores and skips most of the keys a query may not see
VECTORS = 64  # numbers of whole vectors, of every type and CPU
ALONE = 0x4000  # numbers that torch never divides among threads
SHARE = 0x8000  # from which on, for each of its threads, it uses all of them


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] / sqrt(mean(x²) + eps) * weight [W] (arXiv 1910.07467), in float32, returned in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (arXiv 1607.06450), in float32."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by the angles of cos and sin [T, P] (float32).

    Dimension p turns with dimension P + p; dimensions from 2P on pass unchanged.
    """
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((turned[0].to(x.dtype), turned[1].to(x.dtype), rest), dim=-1)


def of_whole_rows(product: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """The same of rows [T, 2W] on a CPU, whose threads begin and end with whole rows.

    Torch divides numbers among threads wherever that falls, and what comes after the last vector of a part is computed
    with another exponential: a row's bits would depend on how many there are beside it.
    """

    @wraps(product)
    def computed(gate_up: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[-1] // 2
        threads = torch.get_num_threads()
        if gate_up.device.type != "cpu" or threads == 1 or rows * width <= ALONE:
            return product(gate_up, *args, **kwargs)
        parts = torch.split(gate_up, list(row_parts(rows, width, threads)))
        return torch.cat([product(part, *args, **kwargs) for part in parts])

    return computed


def row_parts(rows: int, width: int, threads: int) -> Iterator[int]:
    """How many rows of so many numbers to compute at once: as many for each thread, and what is left by one thread."""
    each = rows // threads
    if width <= ALONE and each * width >= SHARE:
        yield each * threads
        rows -= each * threads
    most = max(1, ALONE // width)
    yield from [most] * (rows // most)
    if rows % most:
        yield rows % most


def sigmoid(x: Tensor) -> Tensor:
    """Of float32 numbers. torch's own computes those behind a tensor's last whole vectors with another exponential: a
    row's bits would depend on how many rows there are. Of narrower types this would round thrice.
    """
    return 1.0 / (1.0 + (-x).exp())


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Of x [...], by the error function or `tanh` (arXiv 1606.08415). As with `sigmoid`, a number's bits are its own:
    on a CPU torch gets only what each of its threads computes in whole vectors.
    """
    activation = partial(F.gelu, approximate=approximate)
    if x.device.type != "cpu":
        return activation(x)
    flat, shares = x.contiguous().view(-1), VECTORS * torch.get_num_threads()
    whole = len(flat) // shares * shares
    if whole == len(flat):
        return activation(flat).view(x.shape)
    rest = activation(F.pad(flat[whole:], (0, whole + shares - len(flat))))
    return torch.cat([activation(flat[:whole]), rest])[: len(flat)].view(x.shape)


@of_whole_rows
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2W], gate first. Returns [T, W]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@of_whole_rows
def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up for gate_up [T, 2W], gate first; gelu by its tanh form (arXiv 1606.08415). Returns [T, W]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@of_whole_rows
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) for gate_up [T, 2W], gate first: gpt-oss (arXiv 2508.10925).

    Gate is clamped to `limit` from above, up from both sides. Returns [T, W].
    """
    bounded = gate_up.clamp(max=limit)
    gate, up = bounded.chunk(2, dim=-1)
    # Of half of each row. Over whole rows at once, vectors end elsewhere when there are more rows, and what comes after
    # the last is computed with another exponential: a row's bits would depend on the others.
    share = torch.sigmoid((bounded * alpha).chunk(2, dim=-1)[0])
    return (up.clamp(min=-limit) + 1) * (gate * share)


def write_kv(k: Tensor, v: Tensor, k_plane: Tensor, v_plane: Tensor, slots: Tensor) -> None:
    """Store k and v [T, Hkv, D] at `slots` [T] of planes [num_blocks, block_size, Hkv, D], of any strides and dtype."""
    blocks, offsets = slots // k_plane.shape[1], slots % k_plane.shape[1]
    k_plane[blocks, offsets] = k.to(k_plane.dtype)
    v_plane[blocks, offsets] = v.to(v_plane.dtype)


def gather(k_plane: Tensor, v_plane: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [L, Hkv, D] float32 of the tokens of these blocks, one after another."""
    return k_plane[blocks].flatten(0, 1).float(), v_plane[blocks].flatten(0, 1).float()


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over each sequence's own blocks; returns [T, Hq, D] in q's dtype.

    `window` limits a query to that many last tokens, its own included. `sinks` [Hq] are scores that join each head's
    softmax and have no value: what they weigh is lost. This step's k and v must be written already.
    """
    out = q.new_empty(*q.shape[:2], v_plane.shape[3])
    single: dict[int, list[int]] = {}  # sequences with one query, by the magnitude of their context
    row = 0
    for sequence, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens_list, strict=True)):
        if queries == 1:
            single.setdefault(context.bit_length(), []).append(sequence)
        else:
            rows = slice(row, row + queries)
            table = batch.block_tables[sequence]
            out[rows] = _attend_prompt(q[rows], k_plane, v_plane, table, context, scale, window, sinks)
        row += queries
    for sequences in single.values():
        rows_S = batch.query_start[sequences].long()
        out[rows_S] = _attend_single(q[rows_S], k_plane, v_plane, batch, sequences, scale, window, sinks)
    return out


def _attention_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last of scores [..., L], beside sinks [...] where there are any."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.float().expand(scores.shape[:-1])[..., None]), -1).softmax(-1)[..., :-1]


def _attend_prompt(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    table: Tensor,
    context: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last Tq tokens of one sequence, q [Tq, Hq, D], over its `context` tokens. G is folded into the queries."""
    block_size, kv_heads = k_plane.shape[1], k_plane.shape[2]
    start = context - q.shape[0]
    skipped = 0 if window is None else max(start - window + 1, 0) // block_size  # blocks no query sees
    origin = skipped * block_size
    blocks = table[skipped : -(-context // block_size)]
    keys_HDL = k_plane[blocks].flatten(0, 1)[: context - origin].float().permute(1, 2, 0)
    values_HLD = v_plane[blocks].flatten(0, 1)[: context - origin].float().permute(1, 0, 2)
    out = q.new_empty(*q.shape[:2], v_plane.shape[3])
    for first in range(0, q.shape[0], QUERY_BLOCK):
        piece = q[first : first + QUERY_BLOCK]
        count = piece.shape[0]
        end = start + first + count - origin  # keys the last query of the piece sees
        q_HQD = (piece.float() * scale).view(count, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
        scores_HGTL = torch.bmm(q_HQD, keys_HDL[..., :end]).view(kv_heads, -1, count, end)
        positions_T1 = torch.arange(end - count, end, device=q.device)[:, None]
        positions_L = torch.arange(end, device=q.device)
        hidden_TL = positions_L > positions_T1
        if window is not None:
            hidden_TL |= positions_L <= positions_T1 - window
        scores_HGTL = scores_HGTL.masked_fill_(hidden_TL, float("-inf"))
        sinks_HG1 = None if sinks is None else sinks.view(kv_heads, -1, 1)
        weights_HQL = _attention_weights(scores_HGTL, sinks_HG1).flatten(1, 2)
        out_HGTD = torch.bmm(weights_HQL, values_HLD[:, :end]).view(kv_heads, -1, count, v_plane.shape[3])
        out[first : first + count] = out_HGTD.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend_single(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    batch: RaggedBatch,
    sequences: list[int],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query for each of S sequences of like length, q [S, Hq, D], padded to the longest of them."""
    block_size, kv_heads = k_plane.shape[1], k_plane.shape[2]
    contexts = [batch.context_lens_list[sequence] for sequence in sequences]
    skipped = 0 if window is None else max(min(contexts) - window, 0) // block_size
    tables_SM = batch.block_tables[sequences, skipped : -(-max(contexts) // block_size)]
    keys_SLHD = k_plane[tables_SM].flatten(1, 2).float()
    values_SLHD = v_plane[tables_SM].flatten(1, 2).float()
    ends_S1 = batch.context_lens[sequences, None]
    positions_L = torch.arange(skipped * block_size, skipped * block_size + keys_SLHD.shape[1], device=q.device)
    hidden_SL = positions_L >= ends_S1
    if window is not None:
        hidden_SL |= positions_L < ends_S1 - window
    # Padding may hold anything, NaN too, and a weight of zero does not silence a NaN.
    values_SLHD = values_SLHD.masked_fill(hidden_SL[..., None, None], 0.0)
    q_SHGD = (q.float() * scale).view(len(sequences), kv_heads, -1, q.shape[2])
    scores_SHGL = torch.matmul(q_SHGD, keys_SLHD.permute(0, 2, 3, 1))
    scores_SHGL = scores_SHGL.masked_fill_(hidden_SL[:, None, None], float("-inf"))
    weights_SHGL = _attention_weights(scores_SHGL, None if sinks is None else sinks.view(kv_heads, -1))
    return torch.matmul(weights_SHGL, values_SLHD.permute(0, 2, 1, 3)).flatten(1, 2).to(q.dtype)
