"""A PagedRun whose steps are computed by the compiled CPU kernels instead of the model's modules."""

from __future__ import annotations

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.cpu_forward import CpuForward
from serving.kernels import cpu
from serving.model.decoder import Decoder
from tests.serving.model.paged import PagedRun


class CompiledRun(PagedRun):
    def __init__(self, model: Decoder, sequences: list[list[int]], kernels: cpu.Kernels, *, block_size: int) -> None:
        super().__init__(model, sequences, block_size=block_size)
        self.forward = CpuForward(model, self.kv, kernels, max(len(tokens) for tokens in sequences))

    def compute(self, batch: RaggedBatch) -> Tensor:
        return self.forward.logits(batch, None)
