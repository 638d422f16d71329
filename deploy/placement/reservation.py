"""What one service reserves on a Ray cluster: the placement file's `[ray]`, else what follows from its settings.

Pure, and in Ray's names: cores, GPUs, bytes of memory, and the cluster's own resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.placement.ray_table import RayReservation
from serving.config import EngineConfig, ModelConfig


def worker_bundle(engine: EngineConfig, model: ModelConfig, reserved: RayReservation) -> Mapping[str, float]:
    """A worker's. `model` is as its role has it."""
    gpus = processes_of(model) if model.device.startswith("cuda") else 0
    return _bundle(reserved, cpus=engine.threads or 1, gpus=gpus)


def node_bundle(reserved: RayReservation) -> Mapping[str, float]:
    """That of a node of the KV pool."""
    return _bundle(reserved, cpus=1, gpus=0)


def _bundle(reserved: RayReservation, *, cpus: int, gpus: int) -> Mapping[str, float]:
    bundle: dict[str, Any] = {"CPU": reserved.cpus or cpus}
    amount = gpus if reserved.gpus is None else reserved.gpus
    bundle |= {"GPU": amount} if amount else {}
    bundle |= {"memory": reserved.memory} if reserved.memory else {}
    return bundle | dict(reserved.resources)


def processes_of(model: ModelConfig) -> int:
    """Processes of one worker, each with a device."""
    cut = model.tensor_parallel_size * model.pipeline_parallel_size * model.prefill_context_parallel_size
    return model.data_parallel_size * cut
