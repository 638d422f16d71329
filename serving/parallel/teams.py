"""Teams of several widths over the same ranks, connected before any is needed: a prompt may then take as many ranks as
`widths.choose_width` says.

A team of width w is w neighbours that share a prompt's rows (`ParallelLayout.sequence`). All teams' models use the same
weights in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy

from torch._C._distributed_c10d import PrefixStore, Store

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.meeting import MEETING_SECONDS
from serving.model.decoder import Decoder
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout


def join_teams(
    widths: Collection[int],
    ranks: int,
    rank: int,
    store: Store,
    *,
    deadline: float,
    meeting: float = MEETING_SECONDS,
) -> dict[int, ParallelRank]:
    """By width, this rank's place in its team of that width; all of `ranks` ranks call this with the same widths.

    Raises ValueError for a width that does not divide `ranks`, RankLost for a rank that does not come,
    StoreUnavailable for a store that does not answer.
    """
    for width in widths:
        if width < 1 or ranks % width:
            raise ValueError(f"teams of {width} do not make up {ranks} ranks")
    joined: dict[int, ParallelRank] = {}
    try:
        for width in sorted(set(widths)):
            team, place = divmod(rank, width)
            beneath = PrefixStore(f"width{width}/team{team}", store)
            layout = ParallelLayout(sequence=width)
            joined[width] = ParallelRank.join(layout, place, beneath, deadline=deadline, meeting=meeting)
    except (RankLost, StoreUnavailable):
        for one in joined.values():
            one.close()
        raise
    return joined


def team_models(model: Decoder, teams: Mapping[int, ParallelRank]) -> dict[int, Decoder]:
    """By width, a decoder that computes in the team of that width, over the parameters of `model`, which stays whole.

    Of MLA each holds what it makes of latents, for its heads, a second time. Raises ValueError where the model cannot
    be shared out so.
    """
    found = {}
    for width, ranks in teams.items():
        shared = {id(parameter): parameter for parameter in model.parameters()}
        copy = deepcopy(model, shared)
        hold_share(copy, ranks.layout, ranks.rank)
        found[width] = apply_parallel(copy, ranks)
    return found
