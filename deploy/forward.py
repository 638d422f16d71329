"""Chooses how a worker computes: compiled CPU kernels where they fit the model, torch otherwise, with one line why.

Tokens are drawn the same way as their scores are computed.
"""

from __future__ import annotations

import logging

import torch

from kvcache.device import DevicePool
from serving.config import EngineConfig
from serving.engine.compiled_selection import CompiledSelection
from serving.engine.forward import EagerForward, Forward
from serving.engine.fused import FusedForward, supports
from serving.engine.sampling import Sampler
from serving.engine.selection import TorchSelection
from serving.kernels import cpu
from serving.model.loading import LoadedModel

log = logging.getLogger(__name__)


def make_forward(model: LoadedModel, pool: DevicePool, config: EngineConfig, max_position: int) -> Forward:
    """Raises ValueError when compiled kernels are demanded and cannot be had."""
    reason = _why_not(model, pool, config)
    if reason is None:
        kernels = cpu.load(threads=config.threads)
        if kernels is not None:
            torch.set_num_threads(1)  # or torch's idle threads would spin on the cores the kernels compute on
            return FusedForward(model.model, pool.planes, kernels, max_position)
        reason = "they could not be built"
    if config.deterministic:
        raise ValueError(f"--deterministic needs the compiled kernels, which do not fit here: {reason}")
    if config.kernels == "compiled":
        raise ValueError(f"--kernels compiled: {reason}; choose --kernels auto")
    if config.kernels == "auto":
        log.info("computing with torch: %s", reason)
    return EagerForward(model.model, pool.planes)


def make_sampler(forward: Forward) -> Sampler:
    """What draws the tokens of `forward`'s scores: the kernels that compute these, or torch where they lie."""
    if isinstance(forward, FusedForward):
        return Sampler(CompiledSelection(forward.decoder.kernels))
    return Sampler(TorchSelection())


def _why_not(model: LoadedModel, pool: DevicePool, config: EngineConfig) -> str | None:
    if config.kernels == "torch":
        return "as asked for"
    if pool.planes[0][0].device.type != "cpu":
        return "the model is not on the CPU"
    return supports(model.model, model.dtype)
