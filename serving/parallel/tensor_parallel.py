"""Modules that take the place of a decoder's where each rank holds a share of the weights (Megatron-LM, arXiv
1909.08053): a linear cut by columns sums over ranks, the embedding and the head have a slice of the vocabulary.

They wrap modules that are cut already. All ranks compute the same rows, and have the same bits after each of these.

Shapes: T rows, H hidden width, K inputs that a rank holds, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving.kernels import int8
from serving.model.decoder import Decoder
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp, route
from serving.model.quantized_linear import QuantizedLinear
from serving.parallel.collective import Collective
from serving.parallel.rank_module import RankModule


class SummedLinear(RankModule):
    """x [T, K] of this rank's inputs → [T, out], summed over ranks; the bias is added once.

    Shares in the model's type are added in float32 and rounded once more: with bfloat16 weights the result may differ
    from one process's in its last bit.
    """

    def __init__(self, linear: nn.Linear, group: Collective) -> None:
        super().__init__()
        self.linear, self.group = linear, group
        self.bias = linear.bias
        linear.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        total = self.group.sum(self.linear(x))
        return total if self.bias is None else total + self.bias


class SummedInt8Linear(RankModule):
    """`SummedLinear` of 8-bit weights and activations, with the bits that one process computes.

    A row's scale is taken over all ranks' inputs before it is quantized. What is summed are the integers.
    """

    def __init__(self, linear: QuantizedLinear, group: Collective) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        wide, linear = x.float(), self.linear
        largest = self.group.largest(wide.abs().amax(dim=-1))
        values, row_scale = int8.quantize_rows_to(wide, largest)
        product = self.group.sum(int8.integer_product(values, linear.weight).to(torch.int32))
        return int8.scaled(product, row_scale, linear.scale, linear.bias).to(x.dtype)


def summed(linear: nn.Module, group: Collective) -> nn.Module:
    """The linear layer, cut by columns, with its sum."""
    if isinstance(linear, QuantizedLinear):
        assert not linear.rotation, "a row is transformed as a whole, and a rank has a part of it"
        return SummedInt8Linear(linear, group)
    assert isinstance(linear, nn.Linear)
    return SummedLinear(linear, group)


class SummedMoe(MoeMlp, RankModule):
    """Experts of which each rank holds a share of the width: every rank routes alike, the weighted sums are summed."""

    def __init__(self, mlp: MoeMlp, group: Collective) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)  # its parameters and modules, whatever the family has
        self.group = group
        if group.rank:  # what experts add beside their products is added once
            for expert in mlp.experts:
                assert isinstance(expert, GatedMlp)
                expert.down.register_parameter("bias", None)

    def forward(self, x_TH: Tensor) -> Tensor:
        experts_TK, weights_TK = route(self.router(x_TH), self.spec, self.correction)
        out_TH = self.mixed(x_TH, experts_TK, weights_TK)
        if self.shared is not None:
            out_TH += self.shared(x_TH).float()
        return self.group.sum(out_TH).to(x_TH.dtype)


class VocabularyEmbedding(RankModule):
    """Tokens [T] → [T, H]: each row comes from the one rank that holds it."""

    def __init__(self, embed: nn.Embedding, first: int, group: Collective) -> None:
        """`first` is the token of the first row that this rank holds."""
        super().__init__()
        self.embed, self.first, self.group = embed, first, group

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.first
        held = (rows >= 0) & (rows < self.embed.num_embeddings)
        x_TH = F.embedding(rows.where(held, 0), self.embed.weight)
        return self.group.sum(x_TH.masked_fill(~held[:, None], 0.0))


class VocabularyHead(RankModule):
    """Rows [R, H] → the logits of all tokens [R, V], of which each rank computes some."""

    def __init__(self, head: nn.Linear, vocabulary: int, group: Collective) -> None:
        super().__init__()
        self.head, self.group = head, group
        self.counts = [
            (rank + 1) * vocabulary // group.size - rank * vocabulary // group.size for rank in range(group.size)
        ]

    def forward(self, x_RH: Tensor) -> Tensor:
        return self.gathered(self.head(x_RH))

    def gathered(self, own_RV: Tensor) -> Tensor:
        """Of this rank's logits, all tokens'."""
        padded = F.pad(own_RV, (0, max(self.counts) - own_RV.shape[1]))
        parts = self.group.gathered(padded)
        return torch.cat([part[:, :count] for part, count in zip(parts, self.counts, strict=True)], dim=1)


class TensorShare:
    """What a fused step asks of the other ranks, where it reads the weights of these modules and calls none of them
    (serving.kernels.gpu.decoder.StepRanks). All ranks have all rows.
    """

    shares_rows = False

    def __init__(self, embed: VocabularyEmbedding, head: VocabularyHead) -> None:
        self.embed, self.head = embed, head
        self.embedded, self.summed, self.gathered = embed.forward, embed.group.sum, head.gathered
        self.check = embed.group.check

    def by_heads(self, qkv: Tensor) -> Tensor:
        return qkv

    def by_rows(self, attended: Tensor) -> Tensor:
        return attended

    def all_rows(self, own_TH: Tensor) -> Tensor:
        return own_TH

    def reserve(self, rows: int) -> None:
        """Exchanges take what room they need."""

    @staticmethod
    def of(model: Decoder) -> TensorShare | None:
        """Of a model of which ranks share weights alone, in floats; None for any other that ranks share."""
        exchanging = [module for module in model.modules() if isinstance(module, RankModule)]
        if not all(isinstance(one, SummedLinear | VocabularyEmbedding | VocabularyHead) for one in exchanging):
            return None
        embed, head = model.embed, model.head
        if not isinstance(embed, VocabularyEmbedding) or not isinstance(head, VocabularyHead):
            return None
        return TensorShare(embed, head)
