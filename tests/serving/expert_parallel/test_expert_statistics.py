"""Rows are counted by expert and layer, and each once."""

from __future__ import annotations

import torch

from serving.expert_parallel.expert_statistics import ExpertStatistics


def test_each_layers_rows_are_counted_once() -> None:
    statistics = ExpertStatistics(2, 5)
    first, second = statistics.of_layer(0), statistics.of_layer(1)
    first(torch.tensor([[0, 3], [3, 4]]))
    first(torch.tensor([[3, 1]]))
    first(torch.empty(0, 2, dtype=torch.int64))
    second(torch.tensor([[2, 2]]))
    assert statistics.taken().tolist() == [[1, 1, 0, 3, 1], [0, 0, 2, 0, 0]]
    first(torch.tensor([[4, 0]]))
    assert statistics.taken().tolist() == [[1, 0, 0, 0, 1], [0] * 5]
