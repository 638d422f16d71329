"""Scores of which only allowed tokens' are left, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serving.batch.device_copy import all_on_device, on_device
from serving.grammar.grammars import Allowed


def best_allowed(logits: Tensor, allowed: Allowed) -> int:
    """The token of the highest of `logits` [V] among those allowed, the lowest id among equals.

    -1 where none is allowed, or where one of theirs is no number or the highest is not finite, as when it is sampled.
    """
    scores = logits.float().cpu().numpy()
    best = np.where(allowed.mask(len(scores)), scores, -np.inf)
    token = int(best.argmax())  # NaN is above all
    return token if np.isfinite(best[token]) else -1


def only_allowed(logits: Tensor, allowed: Sequence[Allowed | None]) -> Tensor:
    """`logits` [R, V] with -inf for the tokens that a row does not allow: a new tensor, or itself where all allow all.

    Tokens beyond a row's bits are not allowed. `allowed` has R entries, or none, which allow everything.
    """
    held = [r for r, one in enumerate(allowed) if one is not None]
    if not held:
        return logits
    (bits,) = all_on_device([np.stack([one.bits for one in allowed if one is not None])], logits.device)
    vocab = logits.shape[1]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    known = (bits.unsqueeze(-1) >> shifts & 1).bool().flatten(1)[:, :vocab]  # [held, at most V]
    forbidden = torch.ones(len(held), vocab, dtype=torch.bool, device=logits.device)
    forbidden[:, : known.shape[1]] = ~known
    rows = on_device(held, torch.int64, logits.device)
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))
