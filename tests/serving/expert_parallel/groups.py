"""Groups of every kind of exchange whose ranks are threads of this process, and rows for them to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store

from serving.expert_parallel.all_to_all import AllToAllExchange
from serving.expert_parallel.exchange import ExchangeShape, ExpertExchange, Received
from serving.expert_parallel.hierarchical import HierarchicalExchange, level_shapes
from serving.expert_parallel.local import LocalExchange
from serving.expert_parallel.meeting import MEETING_SECONDS
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.model.moe import weighted_sum

Answer = TypeVar("Answer")
DEADLINE = 10.0
KINDS = ("local", "shared_memory", "all_to_all", "hierarchical")
RANKS = {"local": 1, "shared_memory": 3, "all_to_all": 3, "hierarchical": 4}
# A row is numbers that are added up and quantized many at once, and a rest of them.
SHAPE = ExchangeShape(
    ranks=3, slots=3, top_k=3, hidden=64 + 24 + 3, max_tokens=6, wire=torch.float32, back=torch.float32
)  # fmt: skip


def shape_for(kind: str, **changes: Any) -> ExchangeShape:
    return replace(SHAPE, ranks=RANKS[kind], **changes)


def join(
    kind: str,
    shape: ExchangeShape,
    rank: int,
    store: Store,
    deadline: float = DEADLINE,
    meeting: float = MEETING_SECONDS,
) -> ExpertExchange:
    """The exchange of one rank, met in `store`. Of a hierarchy two ranks make a node."""
    if kind == "local":
        return LocalExchange(shape)
    if kind == "shared_memory":
        return SharedMemoryExchange.join(shape, rank, store, deadline=deadline, meeting=meeting)
    if kind == "all_to_all":
        return AllToAllExchange.join(shape, rank, store, deadline=deadline, meeting=meeting)
    between, within = level_shapes(shape, shape.ranks // 2)
    node, of_node = divmod(rank, 2)
    return HierarchicalExchange(
        shape,
        AllToAllExchange.join(between, node, PrefixStore(f"between{of_node}", store), deadline=deadline),
        SharedMemoryExchange.join(within, of_node, PrefixStore(f"within{node}", store), deadline=deadline),
    )


class Group:
    """All ranks of one exchange, each driven by a thread of its own."""

    def __init__(self, kind: str, shape: ExchangeShape, deadline: float = DEADLINE) -> None:
        self.shape = shape
        self._threads = ThreadPoolExecutor(shape.ranks)
        store = HashStore()
        self.exchanges = self.each(lambda rank: join(kind, shape, rank, store, deadline))

    def each(self, act: Callable[[int], Answer]) -> list[Answer]:
        """What `act(rank)` gives, done by all ranks at once."""
        return [done.result() for done in [self._threads.submit(act, rank) for rank in range(self.shape.ranks)]]

    def close(self) -> None:
        for exchange in getattr(self, "exchanges", ()):
            exchange.close()
        self._threads.shutdown()


def random_experts(rows: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """[rows, top_k] int32, each row's all different."""
    scores = torch.rand(rows, experts, generator=generator)
    return scores.topk(top_k).indices.int()


def made_of(received: Received, first_slot: int) -> Tensor:
    """What stands for experts: each slot multiplies its rows by its own number, [N, H] float32."""
    whole = received.whole()
    rows = whole.values.float()
    if whole.scale is not None:
        rows = rows * whole.scale[:, None]
    slots = torch.arange(first_slot, first_slot + len(received.counts)) + 1
    return rows * slots.repeat_interleave(received.counts)[:, None].float()


def weights_of(physical: Tensor) -> Tensor:
    """Weights [T, K] that differ."""
    return (physical % 7 + 1).float() / 3


def expected(rows: Tensor, physical: Tensor, back: torch.dtype = torch.float32) -> Tensor:
    """What rows [T, H] become by `made_of` of their physical experts [T, K] and `weights_of`: [T, H]."""
    parts = rows.float()[:, None] * (physical[:, :, None] + 1).float()
    return weighted_sum(parts.to(back), weights_of(physical))


def counts_of(ranks: int, generator: torch.Generator, most: int) -> Sequence[int]:
    return torch.randint(0, most + 1, (ranks,), generator=generator).tolist()
