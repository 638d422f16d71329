"""The KV cache's size: as asked for, or what is left of a device's share once its steps were rehearsed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deploy.worker.kv_sizing import (
    kv_cache_bytes,
    left_for_kv,
    measured_kv,
    rehearsed,
    telling_what_takes_less,
)
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.device_memory import DeviceMemory, MemoryReading
from serving.forward.forward import EagerForward
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Decoder
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec

GIB = 1 << 30


class PlayedMemory:
    """A device of 80 GiB: others have 2, the model takes 16, steps 5 at most, graphs 1 of that, libraries 0.5 more."""

    def __init__(self) -> None:
        self.rehearsed = 0
        self.readings = 0

    def reading(self) -> MemoryReading:
        self.readings += 1
        if self.readings == 2:
            assert self.rehearsed == 1
            return MemoryReading(total=80 * GIB, free=62 * GIB - 3 * GIB // 2, held=17 * GIB, peak=21 * GIB)
        return MemoryReading(total=80 * GIB, free=62 * GIB, held=16 * GIB, peak=16 * GIB)

    def rehearse(self) -> None:
        self.rehearsed += 1


def test_what_is_left_beside_the_model_and_its_steps() -> None:
    memory = PlayedMemory()
    assert measured_kv([memory], memory.rehearse, 0.9) == 72 * GIB - 18 * GIB - 5 * GIB - GIB // 2
    assert memory.readings == 3, "the rehearsal's memory is given back before KV is taken"


def test_too_little_is_refused_with_what_helps() -> None:
    memory = PlayedMemory()
    with pytest.raises(ValueError, match=r"0.25 of 80.0 GiB leaves no KV: .* 3.5 GiB more; raise it"):
        measured_kv([memory], memory.rehearse, 0.25)


def test_of_several_devices_the_one_with_the_least_left_says_how_much() -> None:
    """Blocks have one number on all of them."""
    fuller = MemoryReading(total=80 * GIB, free=30 * GIB, held=16 * GIB, peak=16 * GIB)

    class Fuller:
        def reading(self) -> MemoryReading:
            return fuller

    for place in range(2):
        played = PlayedMemory()
        memories: list[DeviceMemory] = [Fuller()]
        memories.insert(place, played)
        assert measured_kv(memories, played.rehearse, 0.9) == 72 * GIB - 50 * GIB


@given(
    total=st.integers(1, 1 << 40),
    shares=st.tuples(*[st.floats(0, 1)] * 5),
    utilization=st.floats(0.01, 1.0),
)
def test_never_more_than_the_share_is_used(total: int, shares: tuple[float, ...], utilization: float) -> None:
    """By all together, at the worst moment of a step; and the whole share is."""
    others, weights, kept, working, libraries = (int(total * share / 5) for share in shares)
    before = MemoryReading(total=total, free=total - others - weights, held=weights, peak=weights)
    after = MemoryReading(
        total=total,
        free=before.free - kept - libraries,
        held=weights + kept,
        peak=weights + kept + working,
    )
    left = left_for_kv(before, after, utilization)
    assert others + weights + kept + working + libraries + left == int(total * utilization)


def test_what_was_asked_for_goes_before_and_a_cpu_has_a_fixed_size() -> None:
    def never() -> None:
        raise AssertionError("nothing is rehearsed")

    assert kv_cache_bytes(EngineConfig(kv_cache_memory=7), "cuda", never) == 7
    assert kv_cache_bytes(EngineConfig(), "cpu", never) == 2 * GIB
    assert kv_cache_bytes(EngineConfig(num_kv_blocks=3), "cuda", never) == 2 * GIB


class NotingForward(EagerForward):
    batches: list[RaggedBatch]

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        self.batches = [batch]
        return super().logits(batch, layer_done)


def test_the_largest_step_is_rehearsed() -> None:
    spec = ModelSpec(
        architecture="llama",
        vocab_size=64,
        hidden=32,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        max_position=64,
        norm_eps=1e-5,
        rope=Rope(frequencies=default_frequencies(10000.0, 8)),
    )
    torch.manual_seed(0)
    forward = NotingForward(Decoder(spec).eval(), DeviceKV(spec.kv_layers("float32"), 1, 16).planes)
    config = EngineConfig(max_num_batched_tokens=47, max_num_seqs=5)
    assert rehearsed(forward, config, 64, "cpu") is forward
    (batch,) = forward.batches
    assert len(batch.tokens) == 47 and len(batch.query_lens) == len(batch.logits_rows) == 5


SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB. See PYTORCH_CUDA_ALLOC"


def test_too_little_memory_is_told_with_what_takes_less() -> None:
    @telling_what_takes_less()
    def captured(capture_fails_too: bool) -> None:
        try:
            raise torch.OutOfMemoryError(SHORT)
        finally:
            if capture_fails_too:
                raise RuntimeError("operation failed due to a previous error during capture")

    for also in (False, True):
        with pytest.raises(ValueError, match=r"2\.00 GiB: the device .* --max-num-seqs, or choose --no-cuda-graphs"):
            captured(also)
    with pytest.raises(ValueError, match=r"no 2\.0 GiB of memory left: lower --kv-cache"), telling_what_takes_less():
        raise MemoryError("the host has no 2.0 GiB of memory left")
    with pytest.raises(RuntimeError, match="a kernel failed"), telling_what_takes_less():
        raise RuntimeError("a kernel failed")
