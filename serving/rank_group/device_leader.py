"""The leader's way from a path to a model whose ranks have a device each, and to a forward pass of all of them.

Which models can be served so is said here too. It knows neither workers nor their configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from serving.config import EngineConfig
from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.forward.choose import make_forward
from serving.forward.forward import EagerForward
from serving.loader.loading import LoadedModel
from serving.model.decoder import Planes
from serving.parallel.layout import ParallelLayout
from serving.rank_group.device_forward import DeviceForward
from serving.rank_group.device_group import GroupOnDevices
from serving.rank_group.device_messages import KeepKV, MakeForward
from serving.rank_group.layout_leader import check_layout, flags_of
from serving.rank_group.layout_rank import connect, load_layout_share
from serving.rank_group.loading import load_together
from serving.rank_group.share import LEADER

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOnDevices(LoadedModel):
    """The leader's share of a model of which each rank has some heads and widths, or some experts, on its own device.
    `spec` is the whole's.

    Close `ranks` when no step runs any more.
    """

    layout: ParallelLayout
    ranks: GroupOnDevices


def check_on_devices(path: Path, dtype: str, quantization: str | None, layout: ParallelLayout, device: str) -> None:
    """Raises ValueError, with what to do, for a model or a layout that ranks with a device each cannot share."""
    if layout.ranks > layout.tensor and not layout.spread_experts:
        raise ValueError(
            f"{flags_of(layout)} with --device {device}: on devices ranks share weights alone: choose"
            f" --tensor-parallel-size {layout.ranks}, or --device cpu"
        )
    check_layout(path, dtype, quantization, layout)


def load_on_devices(
    path: Path, dtype: str, layout: ParallelLayout, deadline: float, device: str, gpus: Sequence[str] = ()
) -> ModelOnDevices:
    """Load the model at `path` over the processes of `layout`, this one among them, each with one of `gpus`.

    `deadline` are the seconds that a rank may keep others waiting in an exchange. Raises ValueError as `load` does, and
    where the ranks cannot work together.
    """
    group = GroupOnDevices(layout, deadline, device, gpus)

    def own() -> LoadedModel:
        return load_layout_share(group.share_of(LEADER, path, dtype))

    return load_together(group, path, dtype, own, partial(ModelOnDevices, ranks=group, layout=layout))


def join_devices(
    shared: ModelOnDevices,
    planes: Sequence[Planes],
    keep: Callable[[int], KeepKV],
    config: EngineConfig,
    max_position: int,
) -> DeviceForward:
    """The forward pass of all ranks: here over `planes`, on each other over what `keep` of its number makes there.

    What was made before is of no use any more. Raises ValueError where the ranks do not come together, or one cannot.
    """
    model, layout, ranks = shared.model, shared.layout, shared.ranks
    orders = {
        other.rank: MakeForward(keep=keep(other.rank), config=config, max_position=max_position)
        for other in ranks.others
    }
    try:
        ranks.meet(lambda store: connect(model, layout, LEADER, store, ranks.deadline))
        own = ranks.make_forward(orders, lambda: make_forward(shared, planes, config, max_position))
        if isinstance(own, EagerForward):
            ranks.wait_on_host()
    except (RankLost, StoreUnavailable) as error:
        raise ValueError(f"the ranks of this worker do not come together: {error}") from error
    what = "experts are" if layout.spread_experts else "model is"
    log.info("the %s shared by %d ranks on %s devices", what, ranks.size, torch.device(ranks.device).type)
    return DeviceForward(own, ranks, shared.spec)
