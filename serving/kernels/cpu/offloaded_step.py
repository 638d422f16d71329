"""A step of one sequence whose KV does not all lie on the device: layer by layer, offloaded KV attended in segments.

Made of the same operations as the fused step, one call each, so that every token has the bits it would have with room
for all of its KV. It may not know where segments come from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.cpu.decoder import CpuDecoder, KvPlanes, KVRange, StepOutput
from serving.kernels.cpu.structures import Finish
from serving.kernels.layer_weights import MlpWeights


def offloaded_step(
    decoder: CpuDecoder,
    batch: RaggedBatch,
    layer_done: Callable[[int], None] | None = None,
    output: StepOutput = StepOutput.LOGITS,
) -> Tensor:
    """`decoder.step(batch, output)` for a batch with `offloaded` KV, logits or hidden. Raises ValueError as `step`.

    `layer_done(layer)` is called when that layer's KV for this batch is complete.
    """
    decoder.check(batch)
    kernels, shape = decoder.kernels, decoder.shape
    x = decoder.embedding[batch.tokens].float()
    for index, layer in enumerate(decoder.layers):
        qkv = kernels.linear(kernels.rms_norm(x, layer.attention_norm, shape.eps), layer.qkv)
        q = decoder.rotate_and_write(index, batch, qkv)
        if layer_done is not None:
            layer_done(index)
        attended = _attend(decoder, index, batch, q)
        kernels.linear(attended.flatten(1), layer.o, finish=Finish.ADD, out=x)
        _add_mlp(decoder, index, x)
    rows = x[batch.logits_rows]
    if output is StepOutput.RESIDUAL:
        return rows
    if not len(rows):
        return torch.empty(0, shape.vocab if output is StepOutput.LOGITS else shape.hidden)
    hidden = kernels.rms_norm(rows, decoder.final_norm, shape.eps)
    return kernels.linear(hidden, decoder.head) if output is StepOutput.LOGITS else hidden


def _attend(decoder: CpuDecoder, index: int, batch: RaggedBatch, q: Tensor) -> Tensor:
    """Attention of q [T, heads, head_dim] over the offloaded segments, then over the batch's own blocks."""
    assert batch.offloaded is not None
    state, out = decoder.attention_state(q.shape[0]), torch.empty_like(q)
    begins = True
    for segment in batch.offloaded.segments():
        planes = KvPlanes(*segment.planes)
        blocks = torch.arange(segment.planes[0].shape[0], dtype=torch.int32)
        kv_range = KVRange(planes=planes, table=blocks, first=segment.first, tokens=segment.tokens, begins=begins)
        decoder.attend_range(index, batch, q, kv_range, state, None)
        begins = False
    own, table = decoder.kv[index], batch.block_tables[0]
    last = KVRange(planes=own, table=table, first=batch.offloaded.tokens, tokens=None, begins=begins)
    decoder.attend_range(index, batch, q, last, state, out)
    return out


def _add_mlp(decoder: CpuDecoder, index: int, x: Tensor) -> None:
    """x += what the layer's MLP, or its experts, make of the normed x."""
    kernels, layer, experts = decoder.kernels, decoder.layers[index], decoder.experts[index]
    normed = kernels.rms_norm(x, layer.mlp_norm, decoder.shape.eps)
    if experts is not None:
        return kernels.experts(normed, experts, x)
    mlp = layer.mlp
    assert isinstance(mlp, MlpWeights)
    gated = kernels.linear(normed, mlp.gate_up, finish=Finish.SWIGLU)
    kernels.linear(gated[:, : mlp.down.inputs], mlp.down, finish=Finish.ADD, out=x)
    return None
