"""Greedy tokens of the compiled forward pass over offloaded KV, where logits are not all numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serving.forward import cpu_forward
from serving.forward.cpu_forward import CpuForward


def test_a_row_without_a_best_token_has_none_with_offloaded_kv_too(monkeypatch: pytest.MonkeyPatch) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1, 2], [3, 3, 1], [inf, 0, 0], [-inf, -inf, -inf], [nan, nan, nan]]
    monkeypatch.setattr(cpu_forward, "offloaded_step", lambda *_: torch.tensor(rows))
    forward, batch = object.__new__(CpuForward), SimpleNamespace(offloaded=object())
    forward.decoder = None  # type: ignore[assignment]
    tokens = forward.greedy(batch, None)  # type: ignore[arg-type]
    assert tokens.tolist() == [2, 0, -1, -1, -1]
    tokens, logits = forward.greedy_and_logits(batch, None, [0, 4])  # type: ignore[arg-type]
    assert tokens.tolist() == [2, 0, -1, -1, -1]
    assert logits.tolist() == [[-inf, 1, 2], [-inf, -inf, -inf]]
