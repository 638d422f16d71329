"""The exchange of several nodes: a row goes once to each node that has an expert of it, and there on to the ranks.

It is made of two exchanges: one between ranks of equal number on all nodes, whose "ranks" are the nodes, and one
between the ranks of a node. A rank's number in the group is node * ranks of a node + its number there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from serving.expert_parallel.exchange import (
    ExchangeShape,
    ExchangeTraffic,
    ExpertExchange,
    RankLost,
    Received,
    RoundTrips,
    Rows,
)


def level_shapes(shape: ExchangeShape, nodes: int) -> tuple[ExchangeShape, ExchangeShape]:
    """Shapes of the exchange between nodes and of that within one. Raises ValueError for ranks that nodes cannot share.

    Within a node a row travels for each of its experts there, so that both levels are the same kind of exchange.
    """
    if shape.ranks % nodes:
        raise ValueError(f"{shape.ranks} ranks cannot be shared evenly by {nodes} nodes")
    of_node = shape.ranks // nodes
    between = replace(shape, ranks=nodes, slots=of_node * shape.slots)
    return between, replace(shape, ranks=of_node, top_k=1, max_tokens=between.most_received)


class HierarchicalExchange(RoundTrips):
    """One rank's part (exchange.ExpertExchange). What travels within a node travels at once."""

    def __init__(self, shape: ExchangeShape, between: ExpertExchange, within: ExpertExchange) -> None:
        """`between` and `within` have the `level_shapes` of `shape`."""
        assert (between.shape, within.shape) == level_shapes(shape, between.shape.ranks)
        self.shape = shape
        self.rank = between.rank * within.shape.ranks + within.rank
        self.between, self.within = between, within
        self._ones: deque[Tensor] = deque()
        self._of_node = torch.arange(between.shape.slots, dtype=torch.int32)

    @property
    def traffic(self) -> ExchangeTraffic:
        """Of both levels; `between.traffic` is what left the node."""
        return self.between.traffic + replace(self.within.traffic, dispatches=0)

    @property
    def agreed(self) -> int:
        return self.within.agreed

    def announce(self, number: int) -> None:
        self.between.announce(number)

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        # Physical experts of the group are numbered node by node: they are those of `between` as they are.
        with self._numbered_between():
            self.between.begin_dispatch(rows, physical_TK)

    def finish_dispatch(self) -> Received:
        with self._numbered_between():
            arrived = self.between.finish_dispatch()
        self.within.announce(self.between.agreed)  # so that the least of a node's ranks is that of all nodes
        slots_N1 = self._of_node.repeat_interleave(arrived.counts)[:, None]
        self._ones.append(torch.ones(slots_N1.shape))
        with self._numbered_within():
            return self.within.dispatch(arrived.whole(), slots_N1)

    def begin_combine(self, results_NH: Tensor) -> None:
        # Within a node each row has one expert, so that nothing is added up there.
        with self._numbered_within():
            arrived = self.within.combine(results_NH, self._ones.popleft())
        with self._numbered_between():
            self.between.begin_combine(arrived)

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        with self._numbered_between():
            return self.between.finish_combine(weights_TK)

    @contextmanager
    def _numbered_between(self) -> Iterator[None]:
        """A rank that is lost by its number in the group."""
        try:
            yield
        except RankLost as lost:
            raise RankLost(self._number(lost.rank, self.within.rank), lost.reason) from lost

    @contextmanager
    def _numbered_within(self) -> Iterator[None]:
        try:
            yield
        except RankLost as lost:
            raise RankLost(self._number(self.between.rank, lost.rank), lost.reason) from lost

    def _number(self, node: int | None, of_node: int | None) -> int | None:
        return None if node is None or of_node is None else node * self.within.shape.ranks + of_node

    def close(self) -> None:
        self.within.close()
        self.between.close()
