"""Modules that take the place of a decoder's where each stage has some of the layers: hidden states go from one stage
to the next, logits from the last to all, so that every rank draws the same token.

A stage goes on to its next step while what it has sent is still on its way, where a step asks for no logits: the chunks
of a prompt follow each other.

Shapes: T rows of the step, H hidden width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serving.parallel.collective import Collective
from serving.parallel.rank_module import RankModule


class ReceivedStates(RankModule):
    """In place of the embedding: [T, H] of the stage before, for so many tokens [T]."""

    def __init__(self, link: Collective, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.link, self.hidden, self.dtype = link, hidden, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        out = torch.empty(len(tokens), self.hidden, dtype=self.dtype, device=tokens.device)
        return self.link.receive(out, sender=0)


class SentStates(RankModule):
    """In place of the final norm: sends [T, H] to the stage that follows, and gives it back."""

    def __init__(self, link: Collective) -> None:
        super().__init__()
        self.link = link

    def forward(self, x_TH: Tensor) -> Tensor:
        self.link.send(x_TH, to=1)
        return x_TH


class LastStageLogits(RankModule):
    """The head on the last stage: logits [R, V] for all stages."""

    def __init__(self, head: nn.Module, group: Collective) -> None:
        super().__init__()
        self.head, self.group = head, group

    def forward(self, x_RH: Tensor) -> Tensor:
        return self.group.shared(self.head(x_RH).float(), self.group.size - 1)


class ReceivedLogits(RankModule):
    """In place of the head on other stages: logits [R, V], float32, of the last, for so many rows."""

    def __init__(self, vocabulary: int, group: Collective) -> None:
        super().__init__()
        self.vocabulary, self.group = vocabulary, group

    def forward(self, x_RH: Tensor) -> Tensor:
        shape = x_RH.new_empty(len(x_RH), self.vocabulary, dtype=torch.float32)
        return self.group.shared(shape, self.group.size - 1)
