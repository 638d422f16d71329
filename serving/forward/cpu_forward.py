"""A built decoder of the Llama shape as one call a step into the compiled CPU kernels.

What it computes with is packed by serving.forward.packing, and what that computes is in serving.kernels.cpu. A batch
with KV in host memory takes one call an operation instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import best_tokens
from serving.forward.layer_events import LayerDone
from serving.forward.llama_shape import rotary_tables
from serving.forward.packing import decoder_of, packed_layers
from serving.forward.step_progress import StepProgress
from serving.kernels import cpu
from serving.kernels.cpu.offloaded_step import offloaded_step
from serving.model.decoder import Decoder, Planes
from serving.model.fused_shape import unlike_llama
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import float8_linears, rotated_linear
from serving.parallel.rank_module import computes_with_others


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
        self.form = f"cpu-{kernels.form}"
        make = decoder_of(model, kernels, max_position, releases=releases)
        kv = [cpu.KvPlanes(*layer) for layer in planes]
        self.decoder = make(layers=packed_layers(model, kernels, releases=releases), kv=kv)
        self._logits = torch.empty(0, spec.vocab_size)
        self._progress = StepProgress()

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
        with self._progress.told(layer_done) as progress:
            return self.decoder.step(batch, output, kept=kept, progress=progress)


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
