"""A built decoder of the Llama shape as one call a step into the compiled CPU kernels.

It packs the model's weights for the kernels and watches their progress to notify of layers; what they compute is in
serving.kernels.cpu. A batch with KV in host memory takes one call an operation instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import best_tokens
from serving.forward.layer_events import LayerDone
from serving.forward.llama_shape import layer_weights, linear_weights, norm_weight, rotary_tables
from serving.forward.released import release
from serving.kernels import cpu
from serving.kernels.cpu.offloaded_step import offloaded_step
from serving.model.decoder import Decoder, Planes
from serving.model.fused_shape import unlike_llama
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import QuantizedLinear, float8_linears, rotated_linear
from serving.parallel.rank_module import computes_with_others

WATCH_SECONDS = 0.0005  # between reads of how many layers are done, in a step with `layer_done`
LEFT = -1  # in place of that number: the step left at the barrier, the rest of the layers will not be done


class CpuForward:
    """Runs `model` over `planes` with `kernels` (serving.forward.forward.Forward). Use `supports` first.

    With `releases` each of the model's linear layers gives up its weights as they are packed: nothing else computes by
    them then, and no moment holds more than one layer's twice.
    """

    def __init__(
        self,
        model: Decoder,
        planes: Sequence[Planes],
        kernels: cpu.Kernels,
        max_position: int,
        *,
        releases: bool = False,
    ):
        spec = model.spec
        self.rope = spec.rope
        self.layers = spec.layers
        self.form = f"cpu-{kernels.form}"
        cos, sin = rotary_tables(spec.rope, max_position)
        pack = partial(_pack, kernels, releases)
        screen = _screen_of(model, kernels)  # before its weights go
        self.decoder = cpu.CpuDecoder(
            kernels,
            cpu.DecoderShape(
                hidden=spec.hidden,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                intermediate=spec.intermediate,
                vocab=spec.vocab_size,
                eps=spec.norm_eps,
            ),
            embedding=model.embed.weight.detach().contiguous(),
            layers=[layer_weights(layer, _float, pack, partial(pack, interleaved=True)) for layer in model.layers],
            final_norm=_float(model.norm),
            head=_pack_head(model, kernels, releases),
            cos=cos,
            sin=sin,
            kv=[cpu.KvPlanes(*layer) for layer in planes],
            screen=screen,
        )
        self._logits = torch.empty(0, spec.vocab_size)
        self._progress = torch.zeros(1, dtype=torch.int32)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="layers")

    def over(self, planes: Sequence[Planes]) -> CpuForward:
        """The same computation, its weights shared, over other planes. One of them computes at a time."""
        other = copy(self)
        other.decoder = self.decoder.over([cpu.KvPlanes(*layer) for layer in planes])
        return other

    def reaching(self, max_position: int) -> CpuForward:
        """The same computation, its weights and planes shared, for so many positions."""
        other = copy(self)
        cos, sin = rotary_tables(self.rope, max_position)
        other.decoder = replace(self.decoder, cos=cos, sin=sin)
        return other

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if batch.offloaded is not None:
            return offloaded_step(self.decoder, batch, layer_done)
        return self._step(batch, layer_done, cpu.StepOutput.LOGITS)

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.greedy_and_logits(batch, layer_done, ())[0]

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if batch.offloaded is None:
            if len(rows) > len(self._logits):  # room for them is kept: memory that is new costs each step its faults
                self._logits = torch.empty(len(rows), self.decoder.shape.vocab)
            kept = self._logits[: len(rows)]
            return self._step(batch, layer_done, cpu.StepOutput.GREEDY, dict(zip(rows, kept, strict=True))), kept
        logits = offloaded_step(self.decoder, batch, layer_done)
        logits.masked_fill_(logits.isnan(), float("-inf"))
        return best_tokens(logits), logits[list(rows)]

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if batch.offloaded is not None:
            return offloaded_step(self.decoder, batch, layer_done, cpu.StepOutput.HIDDEN)
        return self._step(batch, layer_done, cpu.StepOutput.HIDDEN)

    def _step(
        self,
        batch: RaggedBatch,
        layer_done: LayerDone | None,
        output: cpu.StepOutput,
        kept: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        step = partial(self.decoder.step, batch, output, kept=kept)
        if layer_done is None:
            return step()
        self._progress.zero_()
        watching = self._watcher.submit(self._watch, layer_done)
        try:
            return step(progress=self._progress)
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
    if computes_with_others(model):
        return "the fused step computes no model that ranks share"
    if reason := unlike_llama(model.spec):
        return reason
    if model.spec.rope is not None and model.spec.rope.long_frequencies is not None:
        return "LongRoPE needs two rotary tables"
    if (name := float8_linears(model)) is not None:
        return f"the kernels do not multiply {name}'s FP8 weights"
    if (name := _rotated_expert(model)) is not None:
        return f"the fused step does not transform the inputs of {name}"
    if dtype not in ("float32", "bfloat16"):
        return f"the kernels do not compute in {dtype}"
    return None


def _rotated_expert(model: Decoder) -> str | None:
    """The first linear layer of experts whose inputs are transformed; None: there is none."""
    mixtures = ((name, module) for name, module in model.named_modules() if isinstance(module, MoeMlp))
    return next((f"{name}.{linear}" for name, mixture in mixtures if (linear := rotated_linear(mixture))), None)


def _float(norm: nn.Module) -> Tensor:
    return norm_weight(norm).float().contiguous()


def _pack_head(model: Decoder, kernels: cpu.Kernels, releases: bool) -> cpu.PackedLinear:
    """The head in the embedding's type: from its numbers where the two share them, a head that was widened has no more.

    A copy of the largest matrix less, on the way.
    """
    if not model.spec.tied_embeddings or isinstance(model.head, QuantizedLinear):
        return _pack(kernels, releases, model.head, dtype=model.embed.weight.dtype)
    packed = kernels.pack(model.embed.weight.detach())
    if releases:
        release(model.head)
    return packed


def _screen_of(model: Decoder, kernels: cpu.Kernels) -> cpu.HeadScreen | None:
    """What the best tokens are found by where the layers are INT8 and the head is not: half of its bytes once more.

    Those who compress the layers want speed for memory's sake, and of what is left the head is the largest part.
    """
    head = model.head
    narrow = any(isinstance(module, QuantizedLinear) for module in model.modules())
    if not narrow or isinstance(head, QuantizedLinear) or getattr(head, "bias", None) is not None:
        return None
    if model.embed.weight.dtype is not torch.bfloat16:
        return None
    weight = (model.embed if model.spec.tied_embeddings else head).weight.detach()
    return kernels.screen(weight.to(torch.bfloat16))  # which it is packed as: one that was widened has no more


def _pack(
    kernels: cpu.Kernels,
    releases: bool,
    linear: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    interleaved: bool = False,
) -> cpu.PackedLinear:
    """A layer's weights as the kernels stream them: INT8 with scales, or held as `dtype` (its own by default)."""
    w = linear_weights(linear)
    weight, scale, bias = w.weight, w.scale, w.bias
    if scale is None:
        weight = weight.to(dtype or weight.dtype)
    if interleaved:
        weight = cpu.interleave(*weight.chunk(2))
        bias = None if bias is None else cpu.interleave(*bias.chunk(2))
        scale = None if scale is None else cpu.interleave(*scale.chunk(2))
    packed = kernels.pack(weight, scale=scale, bias=bias, rotation=w.rotation)
    if releases:
        release(linear)
    return packed
