"""How much memory a worker's KV cache takes: what was asked for, or what a GPU has left beside the model and its steps.

Steps are measured, not guessed: the largest is computed and every graph captured over a single block of KV before the
cache is allocated. What devices say of their memory comes through `DeviceMemory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deploy.worker.computing import device_memory, sampler_of
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.device_memory import CudaMemory, DeviceMemory, MemoryReading
from serving.forward.forward import Forward
from serving.kvspec import LayerKV
from serving.loader.loading import LoadedModel
from serving.messages import SamplingParams
from serving.sampling.sampler import SampleRow

log = logging.getLogger(__name__)

GIB = 1 << 30
ON_A_CPU = 2 * GIB  # bytes


def left_for_kv(before: MemoryReading, after: MemoryReading, utilization: float) -> int:
    """Bytes that may be KV, so that this share of the device is used in all: by the model, its steps, others, and KV.

    `before` the steps were rehearsed, and `after` that, with their graphs still there. Graphs and libraries take memory
    that torch does not count. May be negative.
    """
    used = before.total - before.free
    steps = after.peak - before.held
    uncounted = (before.free - after.free) - (after.held - before.held)
    return int(before.total * utilization) - used - steps - max(uncounted, 0)


def measured_kv(memories: Sequence[DeviceMemory], rehearse: Callable[[], object], utilization: float) -> int:
    """Bytes of KV on each of these devices for this share of it: what the one has with the least left.

    `rehearse` computes steps on all of them, and returns what holds this process's graphs. Raises ValueError where
    nothing is left.
    """
    before = [memory.reading() for memory in memories]
    forward = rehearse()
    after = [memory.reading() for memory in memories]
    del forward
    memories[0].reading()  # which gives its memory back
    left = [left_for_kv(*readings, utilization) for readings in zip(before, after, strict=True)]
    least = min(left)
    found = before[left.index(least)]
    if least <= 0:
        raise ValueError(
            f"--gpu-memory-utilization {utilization:g} of {found.total / GIB:.1f} GiB leaves no KV: what"
            f" others use, the model and its steps take {-least / GIB:.1f} GiB more; raise it, lower"
            " --max-num-batched-tokens or --max-num-seqs, or give workers that share a GPU each a --kv-cache-memory"
        )
    log.info("KV cache of %.1f GiB: %.1f of %.1f GiB were free", least / GIB, found.free / GIB, found.total / GIB)
    return least


def kv_cache_bytes(
    config: EngineConfig, device: str, rehearse: Callable[[], object], others: Sequence[DeviceMemory] = ()
) -> int:
    """Bytes of a worker's KV cache on this device, and on each of `others`. Raises ValueError where nothing is left."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if torch.device(device).type != "cuda" or config.num_kv_blocks is not None:
        return ON_A_CPU
    return measured_kv([CudaMemory(), *others], rehearse, config.gpu_memory_utilization)


@contextmanager
def telling_what_takes_less() -> Iterator[None]:
    """Memory that does not suffice, a device's or the host's, becomes a ValueError that says what takes less."""
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"{error}: lower --kv-cache-memory or --host-kv-memory") from error
    except RuntimeError as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, torch.OutOfMemoryError):
            found = found.__cause__ or found.__context__  # what ends a capture may fail over it
        if found is None:
            raise
        told = ". ".join(str(found).split(". ")[:2])  # and not which variables of torch's could be set
        raise ValueError(
            f"{told}: the device lacks memory for the model, its KV and its steps; lower --kv-cache-memory,"
            " --max-num-batched-tokens or --max-num-seqs, or choose --no-cuda-graphs"
        ) from error


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What steps are rehearsed with: a model, its KV's layers, the longest context, and what makes a forward pass."""

    model: LoadedModel
    specs: Sequence[LayerKV]
    longest: int
    make_forward: Callable[[LoadedModel, DeviceKV, EngineConfig, int], Forward]

    def over_one_block(self, config: EngineConfig, device: str) -> Forward:
        """The forward pass of the largest step, tuned and captured, over a block of KV."""
        block = device_memory(self.model, self.specs, 1, config, device)
        forward = self.make_forward(self.model, block, config, self.longest)
        return rehearsed(forward, config, self.model.spec.vocab_size, device)


@torch.inference_mode()
def rehearsed(forward: Forward, config: EngineConfig, vocab: int, device: str) -> Forward:
    """The forward pass, after the largest step it may get and the draws of as many tokens; its KV means nothing."""
    tokens = config.max_num_batched_tokens
    sequences = min(config.max_num_seqs, tokens)
    counts = [tokens // sequences + (number < tokens % sequences) for number in range(sequences)]
    batch = RaggedBatch.build(
        tokens=[[0] * count for count in counts],
        starts=[0] * sequences,
        block_tables=[[0] * -(-count // config.block_size) for count in counts],
        block_size=config.block_size,
        device=torch.device(device),
    )
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=vocab // 2, repetition_penalty=1.1)
    rows = [SampleRow(params, position=0, output_tokens=(), prompt_tokens=(0,)) for _ in range(sequences)]
    sampler_of(forward)(forward.logits(batch, None), rows)
    return forward
