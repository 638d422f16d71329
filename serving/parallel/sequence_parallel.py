"""Modules that take the place of a decoder's where each rank has some of a step's rows (DeepSpeed-Ulysses, arXiv
2309.14509): before attention rows are exchanged for heads, after it heads for rows.

Rows are those of the ragged batch, whatever sequences they belong to; a rank may have none. Of MLA, projections to
latents are computed by rows, what is made of latents by heads, and the output by rows (arXiv 2506.12708).

Shapes: T rows of the step, t of this rank, H hidden width, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from serving.parallel.collective import Collective
from serving.parallel.layout import share
from serving.parallel.rank_module import RankModule


class StepRows:
    """Which of the present step's rows each rank has. The embedding begins a step."""

    def __init__(self, group: Collective) -> None:
        self.group = group
        self.total = 0

    def begin(self, total: int) -> None:
        self.total = total

    @property
    def own(self) -> range:
        return share(self.total, self.group.rank, self.group.size)

    @property
    def counts(self) -> list[int]:
        return [len(share(self.total, rank, self.group.size)) for rank in range(self.group.size)]


class OwnRows(RankModule):
    """What `module` makes of this rank's share of the tokens or positions [T]: [t, H]. It may begin the step."""

    def __init__(self, module: nn.Module, rows: StepRows) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, numbers: Tensor) -> Tensor:
        self.rows.begin(len(numbers))
        held = self.rows.own
        out: Tensor = self.module(numbers[held.start : held.stop])
        return out


class RowsToHeads(RankModule):
    """A linear layer of this rank's rows [t, H], whose columns for this rank's heads come back for all rows [T, W]."""

    def __init__(self, linear: nn.Module, columns: Sequence[Sequence[range]], rows: StepRows) -> None:
        """`columns` says, for each rank of the group, which of the layer's outputs it needs, in their order."""
        super().__init__()
        self.linear, self.columns, self.rows = linear, columns, rows

    def forward(self, x_tH: Tensor) -> Tensor:
        return self.by_heads(self.linear(x_tH))

    def by_heads(self, y: Tensor) -> Tensor:
        """Of what the layer has made of this rank's rows [t, out], the exchange."""
        group = self.rows.group
        parts = [torch.cat([y[:, held.start : held.stop] for held in ranges], dim=1) for ranges in self.columns]
        width = parts[group.rank].shape[1]
        came = [count * width for count in self.rows.counts]
        flat = torch.cat([part.reshape(-1) for part in parts])
        return group.exchanged(flat, [part.numel() for part in parts], came).view(self.rows.total, width)


class HeadsToRows(RankModule):
    """A linear layer of this rank's rows, whose inputs come by heads: [T, W] of some heads for all rows → [t, out]."""

    def __init__(self, linear: nn.Module, widths: Sequence[int], rows: StepRows) -> None:
        """`widths` says how many of the layer's inputs each rank of the group has."""
        super().__init__()
        self.linear, self.widths, self.rows = linear, widths, rows

    def forward(self, x_TW: Tensor) -> Tensor:
        out: Tensor = self.linear(self.by_rows(x_TW))
        return out

    def by_rows(self, x_TW: Tensor) -> Tensor:
        """The layer's inputs, whole, of this rank's rows."""
        group, counts = self.rows.group, self.rows.counts
        own, width = counts[group.rank], x_TW.shape[1]
        came = [own * other for other in self.widths]
        flat = group.exchanged(x_TW.reshape(-1), [count * width for count in counts], came)
        parts = [part.view(own, other) for part, other in zip(torch.split(flat, came), self.widths, strict=True)]
        return torch.cat(parts, dim=1)


class AllRows(RankModule):
    """What `module` makes of this rank's rows, of all ranks: [t, H] → [T, H]."""

    def __init__(self, module: nn.Module, rows: StepRows) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x_tH: Tensor) -> Tensor:
        return self.gathered(self.module(x_tH))

    def gathered(self, own_tH: Tensor) -> Tensor:
        """Of this rank's rows, all ranks' [T, H]."""
        return self.rows.group.gathered_rows(own_tH, self.rows.counts)


class OtherStagesRows(RankModule):
    """In place of `AllRows` where another stage goes on: `module` takes the rows, zeros [T, H] come back."""

    def __init__(self, module: nn.Module, rows: StepRows) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x_tH: Tensor) -> Tensor:
        self.module(x_tH)
        return x_tH.new_zeros(1, x_tH.shape[1]).expand(self.rows.total, -1)
