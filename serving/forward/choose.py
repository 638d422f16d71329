"""Chooses how a worker computes: kernels of its device where they fit the model, torch otherwise, with one line why.

The sampling backend follows from that: compiled kernels where they compute the logits, torch elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec

import torch

from serving.config import EngineConfig
from serving.forward.cpu_forward import CpuForward, supports
from serving.forward.cuda_graphs import GraphSizes
from serving.forward.forward import EagerForward, Forward
from serving.kernels import cpu
from serving.loader.loading import LoadedModel
from serving.malloc import give_back_memory
from serving.model.decoder import Planes
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.sampler import Sampler
from serving.sampling.torch_sampling import TorchSampling

log = logging.getLogger(__name__)

AS_ASKED = "as asked for"


def make_forward(
    model: LoadedModel, planes: Sequence[Planes], config: EngineConfig, max_position: int, *, releases: bool = False
) -> Forward:
    """With `releases` nothing else computes by the model, so weights that kernels hold in their own form go.

    Raises ValueError when compiled kernels, or an attention backend, are demanded and cannot be had.
    """
    on_cpu = planes[0][0].device.type == "cpu"
    make = partial(_on_cpu, releases=releases) if on_cpu else _on_cuda
    made = AS_ASKED if config.kernels == "torch" else make(model, planes, config, max_position)
    if not isinstance(made, str):
        return made
    if config.attention_backend != "auto":
        raise ValueError(_unattended(config, "it computes on CUDA alone" if on_cpu else made))
    left_to_torch(config, made)
    return EagerForward(model.model, planes)


def left_to_torch(config: EngineConfig, why: str) -> None:
    """Say why compiled kernels are not to be had. Raises ValueError where they are demanded."""
    if config.deterministic:
        raise ValueError(f"--deterministic needs the compiled kernels, which do not fit here: {why}")
    if config.kernels == "compiled":
        raise ValueError(f"--kernels compiled: {why}; choose --kernels auto")
    if config.kernels == "auto":
        log.info("computing with torch: %s", why)


def _unattended(config: EngineConfig, why: str) -> str:
    """What is said where nothing computes with what was demanded to attend prompts; `why`, as kernels tell."""
    demanded = f"--attention-backend {config.attention_backend}"
    if why == AS_ASKED:
        return f"{demanded}: --kernels torch attends by torch; choose --kernels auto, or --attention-backend auto"
    return f"{demanded}: {why}; choose --attention-backend auto"


def make_sampler(forward: Forward) -> Sampler:
    """The sampler for `forward`'s logits: by the compiled kernels where they compute these, else by torch.

    Where Triton's kernels compute them, these also draw, compiled before this returns.
    """
    if isinstance(forward, CpuForward):
        return Sampler(CpuSampling(forward.decoder.kernels))
    if forward.form == "triton":
        from serving.forward.triton_forward import TritonForward  # these import triton, which is not everywhere
        from serving.sampling import triton_sampling

        assert isinstance(forward, TritonForward)
        triton_sampling.warm_up(forward.model.spec.vocab_size, forward.device)
        return Sampler(TorchSampling(triton_sampling.draw))
    return Sampler(TorchSampling())


def _on_cpu(
    model: LoadedModel, planes: Sequence[Planes], config: EngineConfig, max_position: int, *, releases: bool
) -> Forward | str:
    """The compiled kernels, or why they cannot be had."""
    if config.attention_backend != "auto":
        return "no attention backend is chosen on a CPU"
    reason = supports(model.model, model.dtype)
    if reason is not None:
        return reason
    kernels = cpu_kernels(config, config.threads)
    if kernels is None:
        return "they could not be built"
    torch.set_num_threads(1)  # or torch's idle threads would spin on the cores the kernels compute on
    forward = CpuForward(model.model, planes, kernels, max_position, releases=releases)
    give_back_memory()  # what packing took, and loading before it
    return forward


def cpu_kernels(config: EngineConfig, threads: int | None) -> cpu.Kernels | None:
    """Those that a CPU computes with, by so many threads. Raises ValueError for a form this CPU does not run.

    Workers of equal CPUs could measure different forms to be the quickest, which with --deterministic would not pair.
    """
    form = None if config.cpu_form == "auto" else config.cpu_form
    try:
        kernels = cpu.load(threads=threads, form=form, measured=not config.deterministic)
    except ValueError as error:
        raise ValueError(f"--cpu-form: {error}") from error
    if kernels is not None and form is None and (reason := cpu.amx_unused(kernels.library)):
        _tell_once(f"AMX goes unused, INT8 and bfloat16 prompts may take three times as long: {reason}")
    return kernels


@cache
def _tell_once(line: str) -> None:
    log.warning(line)


def _on_cuda(model: LoadedModel, planes: Sequence[Planes], config: EngineConfig, max_position: int) -> Forward | str:
    """The Triton kernels, ready for every size of step, or why they cannot be had."""
    device = planes[0][0].device
    if device.type != "cuda":
        return f"there are no kernels for {device.type} devices"
    if config.deterministic:
        return "on CUDA a product's bits may depend on its batch"
    if find_spec("triton") is None:
        return "triton is not installed (the extra `gpu`)"
    from serving.forward import triton_forward  # it imports triton, which is not everywhere

    reason = triton_forward.supports(model.model, model.dtype, planes[0])
    if reason is not None:
        return reason
    forward = triton_forward.TritonForward(model.model, planes, max_position)
    forward.choose_prompts(config.attention_backend, config.max_num_batched_tokens)
    sizes = None
    if config.cuda_graphs:
        sizes = GraphSizes.up_to(config.max_num_seqs, max_position, config.max_num_batched_tokens)
    forward.warm_up(config.max_num_batched_tokens, sizes)
    if config.host_kv_memory:
        forward.warm_up_offloaded()
    return forward
