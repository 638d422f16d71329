"""The exchange of a group of one rank: nothing travels, rows are put in order of their experts and back."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from serving.expert_parallel.exchange import ExchangeShape, ExchangeTraffic, Received, RoundTrips, Rows, check_rows
from serving.kernels.int8 import quantize_rows
from serving.model.moe import weighted_sum


def on_the_wire(rows: Rows, wire: torch.dtype) -> Rows:
    """The rows as they travel: quantized if int8 does and they are not yet."""
    if wire is torch.int8 and rows.scale is None:
        return Rows(*quantize_rows(rows.values))
    return rows


class LocalExchange(RoundTrips):
    """All experts are here (exchange.ExpertExchange). Raises ValueError for a shape of several ranks."""

    rank = 0
    traffic = ExchangeTraffic()

    def __init__(self, shape: ExchangeShape) -> None:
        if shape.ranks != 1:
            raise ValueError(f"a local exchange has one rank, not {shape.ranks}")
        self.shape = shape
        self._orders: deque[Tensor] = deque()
        self._arriving: deque[Received] = deque()
        self._returning: deque[Tensor] = deque()
        self._announced = self.agreed = 0

    def announce(self, number: int) -> None:
        self._announced = number

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        check_rows(self.shape, rows, physical_TK)
        sent = on_the_wire(rows, self.shape.wire)
        order = physical_TK.flatten().argsort(stable=True)
        places = order // self.shape.top_k
        scale = None if sent.scale is None else sent.scale[places]
        counts = physical_TK.flatten().bincount(minlength=self.shape.slots).int()
        self._orders.append(order)
        self._arriving.append(Received.of(Rows(sent.values[places], scale), counts))

    def finish_dispatch(self) -> Received:
        self.agreed = self._announced
        return self._arriving.popleft()

    def begin_combine(self, results_NH: Tensor) -> None:
        order = self._orders.popleft()
        parts = torch.empty(len(order), self.shape.hidden, dtype=self.shape.back, device=results_NH.device)
        parts[order] = results_NH.to(self.shape.back)
        self._returning.append(parts.view(-1, self.shape.top_k, self.shape.hidden))

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        return weighted_sum(self._returning.popleft(), weights_TK)

    def close(self) -> None:
        """It holds nothing."""
