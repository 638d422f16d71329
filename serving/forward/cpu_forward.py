"""A built decoder of the Llama shape as one call a step into the compiled CPU kernels.

It packs the model's weights for the kernels and watches their progress to notify of layers; what they compute is in
serving.kernels.cpu. A batch with KV in host memory takes one call an operation instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone
from serving.kernels import cpu
from serving.kernels.cpu.offloaded_step import offloaded_step
from serving.model.decoder import Attention, Decoder, GatedMlp, Layer, Planes, RmsNorm
from serving.model.quantized_linear import QuantizedLinear

WATCH_SECONDS = 0.0005  # between reads of how many layers are done, in a step with `layer_done`
LEFT = -1  # in place of that number: the step left at the barrier, the rest of the layers will not be done


class CpuForward:
    """Runs `model` over `planes` with `kernels` (serving.forward.forward.Forward). Use `supports` first."""

    def __init__(self, model: Decoder, planes: Sequence[Planes], kernels: cpu.Kernels, max_position: int):
        spec = model.spec
        assert model.rotary is not None and spec.rope is not None
        self.layers = spec.layers
        self.form = f"cpu-{kernels.form}"
        cos, sin = rotary_tables(spec.rope.frequencies, spec.rope.magnitude, max_position)
        self.decoder = cpu.CpuDecoder(
            kernels,
            cpu.DecoderShape(
                hidden=spec.hidden,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                rotary_dim=2 * len(spec.rope.frequencies),
                intermediate=spec.intermediate,
                vocab=spec.vocab_size,
                eps=spec.norm_eps,
                attention_scale=spec.head_dim**-0.5,
            ),
            embedding=model.embed.weight.detach().contiguous(),
            layers=[_layer(kernels, layer) for layer in model.layers],
            final_norm=_float(model.norm),
            head=_pack(kernels, model.head, model.embed.weight.dtype),
            cos=cos,
            sin=sin,
            kv=[_kv(layer) for layer in planes],
        )
        self._progress = torch.zeros(1, dtype=torch.int32)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layers")

    def over(self, planes: Sequence[Planes]) -> CpuForward:
        """The same computation, its weights shared, over other planes. One of them computes at a time."""
        other = copy(self)
        other.decoder = self.decoder.over([_kv(layer) for layer in planes])
        return other

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if batch.offloaded is not None:
            return offloaded_step(self.decoder, batch, layer_done)
        logits = self._step(batch, layer_done, greedy=False).logits
        assert logits is not None
        return logits

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if batch.offloaded is not None:
            peaks, best = offloaded_step(self.decoder, batch, layer_done).nan_to_num(nan=float("-inf")).max(dim=-1)
            return best.where(peaks.isfinite(), -1)
        tokens = self._step(batch, layer_done, greedy=True).greedy
        assert tokens is not None
        return tokens

    def _step(self, batch: RaggedBatch, layer_done: LayerDone | None, *, greedy: bool) -> cpu.CpuStepOutput:
        if layer_done is None:
            return self.decoder.step(batch, logits=not greedy, greedy=greedy)
        self._progress.zero_()
        watching = self._watcher.submit(self._watch, layer_done)
        try:
            return self.decoder.step(batch, logits=not greedy, greedy=greedy, progress=self._progress)
        finally:
            self._progress.fill_(LEFT if batch.barrier is not None and batch.barrier.left else self.layers)
            watching.result()

    def _watch(self, layer_done: LayerDone) -> None:
        """Calls `layer_done` for each layer as the kernels count it, on a thread of its own."""
        notified = 0
        while notified < self.layers:
            done = int(self._progress)
            if done == LEFT:
                return
            for layer in range(notified, done):
                layer_done(layer)
            if done == notified:
                time.sleep(WATCH_SECONDS)
            notified = done


def supports(model: Decoder, dtype: str) -> str | None:
    """Why the fused step cannot run this model, or None if it can."""
    spec = model.spec
    if spec.norm != "rms" or spec.mlp != "gated_silu" or spec.rope is None or spec.learned_positions:
        return f"{spec.architecture} is not of the Llama shape"
    if spec.rope.long_frequencies is not None:
        return "LongRoPE needs two rotary tables"
    if dtype not in ("float32", "bfloat16"):
        return f"the kernels do not compute in {dtype}"
    return None


def rotary_tables(
    frequencies: Sequence[float], magnitude: float, positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, pairs] float32 of each position's angle."""
    turns = torch.tensor(frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * turns
    return (angles.cos() * magnitude).contiguous(), (angles.sin() * magnitude).contiguous()


def _layer(kernels: cpu.Kernels, layer: nn.Module) -> cpu.CpuLayerWeights:
    assert isinstance(layer, Layer) and isinstance(layer.attention, Attention) and isinstance(layer.mlp, GatedMlp)
    attention, mlp = layer.attention, layer.mlp
    return cpu.CpuLayerWeights(
        attention_norm=_float(layer.attention_norm),
        mlp_norm=_float(layer.mlp_norm),
        qkv=_pack(kernels, attention.qkv),
        o=_pack(kernels, attention.o),
        gate_up=_pack(kernels, mlp.gate_up, interleaved=True),
        down=_pack(kernels, mlp.down),
        q_norm=None if attention.q_norm is None else _float(attention.q_norm),
        k_norm=None if attention.k_norm is None else _float(attention.k_norm),
        window=attention.window or 0,
    )


def _float(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RmsNorm)
    return norm.weight.detach().float().contiguous()


def _pack(
    kernels: cpu.Kernels, linear: nn.Module, dtype: torch.dtype | None = None, *, interleaved: bool = False
) -> cpu.PackedLinear:
    """A layer's weights as the kernels stream them: INT8 with scales, or held as `dtype` (its own by default)."""
    assert isinstance(linear, nn.Linear | QuantizedLinear)
    scale = linear.scale.detach() if isinstance(linear, QuantizedLinear) else None
    weight = linear.weight.detach()
    if scale is None:
        weight = weight.to(dtype or weight.dtype)
    bias = None if linear.bias is None else linear.bias.detach()
    if interleaved:
        weight = cpu.interleave(*weight.chunk(2))
        bias = None if bias is None else cpu.interleave(*bias.chunk(2))
        scale = None if scale is None else cpu.interleave(*scale.chunk(2))
    return kernels.pack(weight, scale=scale, bias=bias)


def _kv(planes: Planes) -> cpu.KvPlanes:
    """Planes k and v; INT8 ones come with the scales of both."""
    k, v, *scales = planes
    k_scale, v_scale = scales or (None, None)
    return cpu.KvPlanes(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
