"""Where a worker's KV lies and what computes its steps: in this process alone, or in all ranks of its group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from deploy.runtime.settings import check_kernels
from deploy.worker.worker import Worker
from kvcache.memory.device import DeviceKV, token_bytes
from kvcache.memory.ranked_kv import RankedKV, kept_by
from serving.config import EngineConfig
from serving.device_memory import DeviceMemory
from serving.forward.choose import left_to_torch, make_forward, make_sampler
from serving.forward.cpu_forward import CpuForward
from serving.forward.forward import Forward
from serving.kvspec import LayerKV
from serving.loader.loading import LoadedModel
from serving.rank_group.compiled import compiled_form
from serving.rank_group.device_forward import DeviceForward
from serving.rank_group.device_leader import ModelOnDevices, join_devices
from serving.rank_group.forward import GroupForward
from serving.rank_group.layout_leader import DividedModel, flags_of, join_layout
from serving.rank_group.leader import SpreadModel, join_group
from serving.rank_group.ranks import RankGroup
from serving.sampling.sampler import Sampler

log = logging.getLogger(__name__)


def device_memory(
    model: LoadedModel, specs: Sequence[LayerKV], blocks: int, config: EngineConfig, device: str
) -> DeviceKV:
    """KV of so many blocks, in memory that all ranks of the model share where it has several.

    Of ranks that have a device each, what this one keeps lies here, and what is copied is that of all.
    """
    if isinstance(model, SpreadModel | DividedModel):
        planes = model.ranks.share_planes(specs, blocks, config.block_size)
        return DeviceKV(specs, blocks, config.block_size, planes=planes)
    if isinstance(model, ModelOnDevices):
        ranks = model.ranks
        return RankedKV(specs, blocks, config.block_size, device, ranks=ranks.size, lanes=ranks.lanes)
    return DeviceKV(specs, blocks, config.block_size, device)


def most_kept(model: LoadedModel, specs: Sequence[LayerKV]) -> Sequence[LayerKV]:
    """What of the whole model's KV, `specs`, one process's memory holds: of several that of the one that keeps most."""
    if not isinstance(model, ModelOnDevices):
        return specs
    return max((kept_by(rank, model.ranks.size, specs) for rank in range(model.ranks.size)), key=token_bytes)


def packed_on(model: LoadedModel, device: str) -> str:
    """The device that KV is packed on as it is handed over: what several devices have meets in host memory."""
    return "cpu" if isinstance(model, ModelOnDevices) else device


def other_devices(model: LoadedModel) -> Sequence[DeviceMemory]:
    """The devices, beside this process's, that have KV of the model."""
    return model.ranks.memories if isinstance(model, ModelOnDevices) else ()


def sampler_of(forward: Forward) -> Sampler:
    """What draws from its logits, on this process's device (choose.make_sampler)."""
    if isinstance(forward, GroupForward):
        return forward.sampler()
    return make_sampler(forward.own if isinstance(forward, DeviceForward) else forward)


def forward_of(
    model: LoadedModel, device_kv: DeviceKV, config: EngineConfig, max_position: int, *, releases: bool = False
) -> Forward:
    """With `releases` the model is for this forward pass alone, and weights that it holds otherwise go.

    Raises ValueError where compiled kernels are demanded and cannot be had, or ranks do not come together.
    """
    if isinstance(model, DividedModel):
        check_kernels(config, flags_of(model.layout))
        log.info("computing with torch: the model is shared by %d ranks", model.ranks.size)
        return join_layout(model, device_kv.planes)
    if isinstance(model, ModelOnDevices):
        assert isinstance(device_kv, RankedKV), "KV of one process"
        return join_devices(model, device_kv.planes, device_kv.keep, config, max_position)
    if not isinstance(model, SpreadModel):
        return make_forward(model, device_kv.planes, config, max_position, releases=releases)
    compiled = compiled_form(model, config, max_position)
    if isinstance(compiled, str):
        left_to_torch(config, f"{compiled} (experts over {model.ranks.configured} ranks)")
    form = None if isinstance(compiled, str) else compiled
    return join_group(model, device_kv.planes, config.max_num_batched_tokens, form)


class KeptForward:
    """`forward_of` for one worker after the other of one process: on a CPU the next one shares packed weights.

    What it keeps is over a single block, so that a worker that has ended gives its KV back. The model's own weights go
    as they are packed: give it a model that nobody else computes by.
    """

    def __init__(self) -> None:
        self._kept: Forward | None = None
        self._limit = 0

    def __call__(self, model: LoadedModel, device_kv: DeviceKV, config: EngineConfig, max_position: int) -> Forward:
        """Raises as `forward_of`."""
        if device_kv.planes[0][0].device.type != "cpu" or ranks_of(model) > 1:
            return forward_of(model, device_kv, config, max_position)
        if self._kept is None:
            forward = forward_of(model, device_kv, config, max_position, releases=True)
            block = DeviceKV(device_kv.specs, 1, device_kv.block_size)
            self._kept, self._limit = forward.over(block.planes), max_position
        elif max_position > self._limit and isinstance(self._kept, CpuForward):
            self._kept, self._limit = self._kept.reaching(max_position), max_position
        return self._kept.over(device_kv.planes)


def ranks_of(model: LoadedModel) -> int:
    """How many processes compute its steps."""
    if isinstance(model, SpreadModel):
        return model.ranks.configured
    return model.ranks.size if isinstance(model, DividedModel | ModelOnDevices) else 1


def lead_ranks(worker: Worker, model: LoadedModel) -> None:
    """Let a worker, where it is of several ranks, tell what they do."""
    if isinstance(model, SpreadModel):
        worker.rank_counters = partial(counters_of, model.ranks)
    if isinstance(model, DividedModel | ModelOnDevices):
        model.ranks.watch(worker.loop.fail)
        worker.rank_counters = lambda: {"parallel_bytes": float(model.ranks.bytes_sent)}


def counters_of(ranks: RankGroup) -> Mapping[str, float]:
    """Running totals of the ranks, and their balance, by metric (serving.worker_metrics)."""
    totals, counts = ranks.totals, ranks.counts
    traffic = totals.traffic
    return {
        "expert_dispatch_bytes": float(traffic.dispatch_bytes + traffic.routing_bytes),
        "expert_combine_bytes": float(traffic.combine_bytes),
        "expert_ranks_lost": float(counts.losses),
        "expert_ranks_rejoined": float(counts.admitted),
        "expert_steps_repeated": float(counts.repeated_steps),
        "expert_recovery_seconds": counts.stalled_seconds,
        "experts_reloaded": float(counts.loaded_experts),
        "experts_moved": float(totals.moved_experts),
        "experts_moved_bytes": float(totals.moved_bytes),
        "expert_ranks": float(ranks.there),
        "expert_bytes_to_hosts": float(totals.bytes_to_hosts),
        "expert_bytes_from_hosts": float(totals.bytes_from_hosts),
        "expert_imbalance": ranks.imbalance,
    }
