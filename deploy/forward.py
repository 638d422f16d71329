"""Chooses how a worker computes: kernels of its device where they fit the model, torch otherwise, with one line why.

Tokens are drawn the same way as their scores are computed.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from kvcache.device import DevicePool
from serving.config import EngineConfig
from serving.engine.compiled_selection import CompiledSelection
from serving.engine.forward import EagerForward, Forward
from serving.engine.fused import FusedForward, supports
from serving.engine.graphs import GraphSizes
from serving.engine.sampling import Sampler
from serving.engine.selection import TorchSelection
from serving.kernels import cpu
from serving.model.loading import LoadedModel

log = logging.getLogger(__name__)


def make_forward(model: LoadedModel, pool: DevicePool, config: EngineConfig, max_position: int) -> Forward:
    """Raises ValueError when compiled kernels are demanded and cannot be had."""
    make = _on_cpu if pool.planes[0][0].device.type == "cpu" else _on_cuda
    made = "as asked for" if config.kernels == "torch" else make(model, pool, config, max_position)
    if not isinstance(made, str):
        return made
    if config.deterministic:
        raise ValueError(f"--deterministic needs the compiled kernels, which do not fit here: {made}")
    if config.kernels == "compiled":
        raise ValueError(f"--kernels compiled: {made}; choose --kernels auto")
    if config.kernels == "auto":
        log.info("computing with torch: %s", made)
    return EagerForward(model.model, pool.planes)


def make_sampler(forward: Forward) -> Sampler:
    """What draws the tokens of `forward`'s scores: the kernels that compute these, or torch where they lie."""
    if isinstance(forward, FusedForward):
        return Sampler(CompiledSelection(forward.decoder.kernels))
    return Sampler(TorchSelection())


def _on_cpu(model: LoadedModel, pool: DevicePool, config: EngineConfig, max_position: int) -> Forward | str:
    """The compiled kernels, or why they cannot be had."""
    reason = supports(model.model, model.dtype)
    if reason is not None:
        return reason
    kernels = cpu.load(threads=config.threads)
    if kernels is None:
        return "they could not be built"
    torch.set_num_threads(1)  # or torch's idle threads would spin on the cores the kernels compute on
    return FusedForward(model.model, pool.planes, kernels, max_position)


def _on_cuda(model: LoadedModel, pool: DevicePool, config: EngineConfig, max_position: int) -> Forward | str:
    """The Triton kernels, ready for every size of step, or why they cannot be had."""
    device = pool.planes[0][0].device
    if device.type != "cuda":
        return f"there are no kernels for {device.type} devices"
    if config.deterministic:
        return "on CUDA a product's bits may depend on its batch"
    if find_spec("triton") is None:
        return "triton is not installed (the extra `gpu`)"
    from serving.engine import triton_forward  # it imports triton, which is not everywhere

    reason = triton_forward.supports(model.model, model.dtype, pool.planes[0])
    if reason is not None:
        return reason
    forward = triton_forward.TritonForward(model.model, pool.planes, max_position)
    sizes = GraphSizes.up_to(config.max_num_seqs, max_position) if config.cuda_graphs else None
    forward.warm_up(config.max_num_batched_tokens, sizes)
    return forward
