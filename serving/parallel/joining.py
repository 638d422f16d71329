"""How the ranks of a layout meet: one store, one watch over all processes, and a process group for each form.

Groups are made ahead, before any is needed. Of the model it knows nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch._C._distributed_c10d import PrefixStore, Store

from serving.expert_parallel.all_to_all import connected, host_key
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.meeting import MEETING_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.parallel.collective import Collective
from serving.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRank:
    """One rank's groups: None where a form has one rank. A link is a group of this stage and one beside it."""

    layout: ParallelLayout
    rank: int
    waits: BoundedWaits
    tensor: Collective | None
    sequence: Collective | None
    pipeline: Collective | None
    previous: Collective | None
    following: Collective | None

    @classmethod
    def join(
        cls, layout: ParallelLayout, rank: int, store: Store, *, deadline: float, meeting: float = MEETING_SECONDS
    ) -> Self:
        """Meet the other ranks in `store` within `meeting` seconds, and connect to them by gloo.

        `deadline` is the longest wait for any of them, in seconds. Raises RankLost for one that does not come,
        StoreUnavailable for a store that does not answer.
        """
        own = f"{host_key()} {os.getpid()}"
        words = exchanged(store, "process", rank, layout.ranks, own.encode(), meeting)
        processes = {other: word.decode().rsplit(" ", 1) for other, word in enumerate(words) if other != rank}
        near = {other: int(pid) for other, (host, pid) in processes.items() if host == host_key()}
        watch, on_one_host = ProcessWatch(near), len(near) == len(processes)
        waits = BoundedWaits(store, rank, layout.ranks, watch, deadline)
        stages = layout.pipeline_group(rank)
        stage = layout.place(rank).stage

        made: list[Collective] = []

        def group(form: str, ranks: Sequence[int]) -> Collective | None:
            if len(ranks) < 2:
                return None
            made.append(_connected(store, form, ranks, rank, waits, on_one_host))
            return made[-1]

        try:
            return cls(
                layout=layout,
                rank=rank,
                waits=waits,
                tensor=group("tensor", layout.tensor_group(rank)),
                sequence=group("sequence", layout.sequence_group(rank)),
                pipeline=group("pipeline", stages),
                previous=group("link", stages[stage - 1 : stage + 1] if stage else ()),
                following=group("link", stages[stage : stage + 2]),
            )
        except (RankLost, StoreUnavailable):
            waits.close()
            for one in made:
                one.close()
            raise

    @property
    def groups(self) -> list[Collective]:
        every = (self.tensor, self.sequence, self.pipeline, self.previous, self.following)
        return [group for group in every if group is not None]

    @property
    def bytes_sent(self) -> int:
        return sum(group.bytes_sent for group in self.groups)

    def close(self) -> None:
        self.waits.close()
        for group in self.groups:
            group.close()


def _connected(
    store: Store, form: str, ranks: Sequence[int], rank: int, waits: BoundedWaits, on_one_host: bool
) -> Collective:
    prefix = f"{form}/{'-'.join(map(str, ranks))}"
    # gloo's own limit only ends what these waits have given up long before.
    place, beneath = ranks.index(rank), PrefixStore(prefix, store)
    group = connected(beneath, place, len(ranks), 2 * waits.deadline, on_one_host=on_one_host)
    return Collective(group, len(ranks), waits)
