"""From experts, as the router names them, to physical experts: the slots of ranks that hold them or copies of them.

Which copy a row goes to depends on the row's number and on the rank alone. What comes back has the same bits from any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.model.expert_balance import ExpertPlacement


class PhysicalExperts:
    """Where one rank's rows find the experts of one layer: on the rank itself if it can be, else on copies in turn.

    Of E experts: `copies` [E] how many there are to choose from, `table` [E, C] which, as `of` gives them; both int32.
    """

    def __init__(self, placement: ExpertPlacement, rank: int) -> None:
        slots = len(placement.slots[0])
        own = {expert: rank * slots + slot for slot, expert in reversed(list(enumerate(placement.slots[rank])))}
        found: list[list[int]] = [[] for _ in range(placement.experts)]
        for holder, held in enumerate(placement.slots):
            for expert in dict.fromkeys(held):  # a rank that has it in several slots has it once
                found[expert].append(holder * slots + held.index(expert))
        chosen = [[own[expert]] if expert in own else copies for expert, copies in enumerate(found)]
        most = max(map(len, chosen))
        self.copies = torch.tensor([len(copies) for copies in chosen], dtype=torch.int32)
        self.table = torch.tensor([copies + [0] * (most - len(copies)) for copies in chosen], dtype=torch.int32)

    def of(self, experts_TK: Tensor) -> Tensor:
        """Physical experts [T, K] int32: rank * slots + slot. Of several copies row t takes number t mod copies."""
        rows_T1 = torch.arange(len(experts_TK), device=experts_TK.device)[:, None]
        return self.table[experts_TK, rows_T1 % self.copies[experts_TK]]
