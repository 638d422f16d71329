"""The leader's way from a path to a model whose experts its ranks hold with it, and to a forward pass over all of them.

Which models can be served so is said here too. It knows neither workers nor their configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from serving.checkpoint.checkpoint import DTYPES
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import WIRE_DTYPES, ExchangeUnavailable, RankLost
from serving.expert_parallel.rehosting import ExpertLoader
from serving.expert_parallel.shared_memory import functions
from serving.expert_parallel.surviving import ExpertsLost
from serving.loader.loading import LoadedModel, open_checkpoint
from serving.loader.rotations import refuse_rotations
from serving.model.decoder import Planes
from serving.rank_group.compiled import compiled_computing
from serving.rank_group.forward import GroupForward
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.loading import load_together
from serving.rank_group.member import EpochMember, loader_of
from serving.rank_group.messages import Balancing, CompiledForm
from serving.rank_group.ranks import RankGroup
from serving.rank_group.share import LEADER, even_placements, load_share, refuse_dense

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadModel(LoadedModel):
    """The leader's share of a model, and the ranks that hold the rest. Close `ranks` when no step runs any more."""

    ranks: RankGroup
    load_expert: ExpertLoader  # reads experts of the model that no rank holds any more


def check_spread(path: Path, dtype: str, quantization: str | None, ranks: int, redundant: int = 0) -> None:
    """Raises ValueError for a model at `path`, loaded so, that so many ranks of one worker cannot serve.

    `redundant` experts are held once more than the others.
    """
    spec, checkpoint, own_dtype = open_checkpoint(path)
    refuse_dense(spec, ranks)
    assert spec.moe is not None
    if ranks > spec.moe.experts:
        raise ValueError(
            f"--data-parallel-size {ranks}: of {spec.moe.experts} experts each rank holds one at least; choose"
            f" {spec.moe.experts} or less"
        )
    if redundant > spec.moe.experts * (ranks - 1):
        raise ValueError(
            f"--eplb-config: {ranks} ranks hold {spec.moe.experts} experts {ranks} times at most, so"
            f" num_redundant_experts is {spec.moe.experts * (ranks - 1)} or less"
        )
    refuse_rotations(path)
    computed_in = own_dtype if dtype == "auto" else dtype
    if DTYPES.get(computed_in) not in WIRE_DTYPES:
        raise ValueError(
            f"--data-parallel-size {ranks}: rows do not travel between ranks in {computed_in}; choose --dtype bfloat16"
            " or --dtype float32"
        )
    if checkpoint.float8:
        raise ValueError(f"--data-parallel-size {ranks}: ranks share no FP8 weights: use a checkpoint in BF16 or INT8")
    if quantization == "int8" and not checkpoint.int8_names:
        raise ValueError(
            f"--quantization int8: {ranks} ranks load parts of the model, which cannot be quantized then; write it in"
            " INT8 with `millrace quantize` first, and serve that"
        )


def load_spread(
    path: Path,
    dtype: str,
    quantization: str | None,
    ranks: int,
    deadline: float,
    *,
    redundant: int = 0,
    balancing: Balancing | None = None,
    lobby: HostLobby | None = None,
) -> SpreadModel:
    """Load the model at `path` over `ranks` processes, this one among them, which share its threads.

    `deadline` are the seconds that a rank may keep others waiting in a step. `redundant` experts have copies at first;
    with `balancing` experts move. Those that the `lobby` has no place for here come by it, on other hosts. Raises
    ValueError as `load` does, and where the ranks cannot work together.
    """
    check_spread(path, dtype, quantization, ranks, redundant)
    try:
        functions()  # compiled here, not by all ranks at once
    except ExchangeUnavailable as error:
        raise ValueError(f"--data-parallel-size {ranks}: {error}") from error
    torch.set_num_threads(max(1, torch.get_num_threads() // (ranks if lobby is None else lobby.local)))
    group = RankGroup(ranks, deadline, redundant=redundant, balancing=balancing, lobby=lobby)
    own = partial(load_share, path, dtype, LEADER, ranks, redundant, quantization)
    make = partial(SpreadModel, ranks=group, load_expert=loader_of(path, dtype))
    return load_together(group, path, dtype, own, make)


def join_group(
    spread: SpreadModel, planes: Sequence[Planes], max_tokens: int, compiled: CompiledForm | None = None
) -> GroupForward:
    """The forward pass of all ranks over `planes` (RankGroup.share_planes), for steps of at most `max_tokens` rows.

    By the compiled kernels with `compiled`, which has to fit (compiled.compiled_form), else by torch. Raises ValueError
    where the ranks do not come together, or find no memory for the rows of such a step.
    """
    ranks = spread.ranks
    placements = ranks.of_members(even_placements(spread.spec, ranks.configured, ranks.redundant))
    blocks, block_size, *_ = planes[0][0].shape
    max_tokens = min(max_tokens, blocks * block_size)  # each row of a step has KV of its own
    computing = None if compiled is None else compiled_computing(spread.model, compiled, leads=True)
    own = EpochMember(spread.model, spread.load_expert, max_tokens, ranks.deadline, ranks.balancing, computing)
    try:
        ranks.meet(own, placements, max_tokens, compiled)
        return GroupForward(own.computing, planes, ranks)
    except (RankLost, ExpertsLost, ExchangeUnavailable, StoreUnavailable) as error:
        raise ValueError(f"the ranks of this worker do not come together: {error}") from error
    except (RuntimeError, OSError) as error:  # torch's, and the system's, where there is no such memory
        raise ValueError(
            f"{max_tokens} rows of a step cannot travel between ranks (a lower --max-num-batched-tokens needs less"
            f" memory): {str(error).partition(chr(10))[0]}"
        ) from error
