"""Layouts of very wide groups, as CloudMatrix-Infer has them (arXiv 2506.12708): one expert a rank, and who feeds whom.

Pure. It knows numbers of ranks and experts, no loads but those it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.expert_balance import ExpertPlacement, Layout, placed


@dataclass(frozen=True, kw_only=True, slots=True)
class OneExpertARank:
    """Some ranks hold a replica of the shared expert, the others one routed expert each, `redundant` of them a copy.

    EP320 is the default: 32 + 256 + 32 ranks. The ranks of shared replicas are spread evenly, so that each has as many
    neighbours that send their rows to it. Raises ValueError where replicas cannot be spread evenly.
    """

    shared: int = 32
    routed: int = 256
    redundant: int = 32

    def __post_init__(self) -> None:
        if self.shared < 1 or self.routed < 1 or self.redundant < 0 or self.ranks % self.shared:
            raise ValueError(f"{self.shared} shared replicas cannot be spread evenly over {self.ranks} ranks")

    @property
    def ranks(self) -> int:
        return self.shared + self.routed + self.redundant

    @property
    def shared_expert(self) -> int:
        """The number that the shared expert has in a placement: the one after the routed."""
        return self.routed

    def shared_rank_of(self, rank: int) -> int:
        """The rank whose replica of the shared expert computes the rows of `rank`."""
        each = self.ranks // self.shared
        return rank // each * each

    def placed(self, of_routed: Sequence[float]) -> ExpertPlacement:
        """All ranks' experts, for routed experts of these loads: copies go to those of most load a copy."""
        if len(of_routed) != self.routed:
            raise ValueError(f"{len(of_routed)} loads of {self.routed} routed experts")
        others = placed(of_routed, Layout(ranks=self.routed + self.redundant, slots=1))
        remaining = iter(others.slots)
        slots = [
            (self.shared_expert,) if self.shared_rank_of(rank) == rank else next(remaining)
            for rank in range(self.ranks)
        ]
        return ExpertPlacement(tuple(slots), self.routed + 1)


def prefill_rank_of(
    decode_dp_rank: int, decode_tp_rank: int, *, prefill_tp: int, decode_tp: int, decode_dp: int
) -> int:
    """The rank of a prefill group whose KV a decode rank pulls, so that every prefill rank feeds as many.

    Decode ranks fall into prefill_tp / decode_tp groups of neighbours; each group pulls from the decode_tp prefill
    ranks of its own. Raises ValueError for widths that do not divide each other, and for ranks that do not exist.
    """
    if prefill_tp % decode_tp or decode_dp % (prefill_tp // decode_tp):
        raise ValueError(
            f"{decode_dp} decode ranks of width {decode_tp} do not share {prefill_tp} prefill ranks evenly"
        )
    if not (0 <= decode_dp_rank < decode_dp and 0 <= decode_tp_rank < decode_tp):
        raise ValueError(f"there is no decode rank {decode_dp_rank}, {decode_tp_rank}")
    group_size = decode_dp // (prefill_tp // decode_tp)
    return decode_dp_rank // group_size * decode_tp + decode_tp_rank
