"""The layer with which DeepSeek-V3 predicts the token after the next (arXiv 2412.19437, section 2.2), as a module.

It goes on from what a built decoder makes of a token, and shares that one's embedding and rotation. It knows nothing of
checkpoints, nor of who asks it for drafts.

Shapes: T tokens, H hidden width, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.model.decoder import Decoder, Layer, Planes, make_norm
from serving.model.spec import ModelSpec


class MtpHead(nn.Module):
    """x = eh_proj[enorm(embedding of token t+1); hnorm(hidden state of t)], one layer over x, then norm and head.

    Formula 21 of the paper, in the order of the published weights. The hidden state is the decoder's after its final
    norm; for the tokens after, it is this module's own after `norm`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = layer_spec(spec)
        self.enorm = make_norm(spec)
        self.hnorm = make_norm(spec)
        self.eh_proj = nn.Linear(2 * spec.hidden, spec.hidden, bias=False)
        self.layer = Layer(self.spec, spec.layers)
        self.norm = make_norm(spec)
        self.head: nn.Linear | None = nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    def forward(self, main: Decoder, batch: RaggedBatch, hidden_TH: Tensor, planes: Planes) -> Tensor:
        """[T, H] after `norm`, for `batch` of the tokens t+1 at the positions of `hidden_TH`, those of t.

        KV of these positions is written into `planes`.
        """
        embedded_TH = main.embed(batch.tokens)
        x_TH = self.eh_proj(torch.cat((self.enorm(embedded_TH), self.hnorm(hidden_TH)), dim=-1))
        rotation = main.rotary(batch) if main.rotary is not None else None
        return self.norm(self.layer(x_TH, rotation, batch, planes))  # type: ignore[no-any-return]

    def logits(self, main: Decoder, hidden_RH: Tensor) -> Tensor:
        """Scores [R, V] float32 of the token after t+1; by the decoder's head where it is the same."""
        if self.head is None:
            return main.logits(hidden_RH)
        return self.head(hidden_RH.to(self.head.weight.dtype)).float()  # type: ignore[no-any-return]


def layer_spec(spec: ModelSpec) -> ModelSpec:
    """The spec of a decoder with one layer more, of the kind of the last."""
    moe = spec.moe and replace(spec.moe, sparse=(*spec.moe.sparse, spec.moe.sparse[-1]))
    windows = (*spec.windows, spec.windows[-1]) if spec.windows else ()
    return replace(spec, layers=spec.layers + 1, moe=moe, windows=windows)
