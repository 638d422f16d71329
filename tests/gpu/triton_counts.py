"""Launches, copies and host waits of a step with a prompt, through the Triton path: of an 8B's 32 layers, or of as many
with mixtures of experts.

Its kernels are counted and do nothing, so what is drawn means nothing. `tests.gpu.step_counts` prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import StepLimits
from serving.engine.overlap import OverlapEngine
from serving.engine.runner import ModelRunner
from serving.forward.cuda_graphs import GraphSizes
from serving.model.decoder import Decoder
from serving.model.moe_spec import MoeSpec
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec
from tests.fakes.sequences import make_sequence
from tests.gpu.fake_cuda import DEVICE, Counted, FakeCuda
from tests.gpu.fake_graphs import GraphingCuda, counting_triton
from tests.gpu.late_forward import SPEC, device_pool

SIZE, BUDGET = 16, 64
ROPE = Rope(frequencies=default_frequencies(1e4, 16))
SHAPE = replace(SPEC, layers=32, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, rope=ROPE)
SPARSE = replace(SHAPE, moe=MoeSpec(experts=3, top_k=2, intermediate=32, sparse=(True,) * SHAPE.layers))


def mixed_steps(steps: int, *, graphs: bool, shape: ModelSpec = SHAPE) -> Counter[Counted]:
    """What so many steps take in which three sequences decode beside chunks of a prompt that draw nothing."""
    from serving.forward.triton_forward import TritonForward

    cuda, longest = GraphingCuda(), BUDGET * (steps + 2)
    blocks = 2 * longest // SIZE
    with counting_triton(cuda), torch.inference_mode():
        device_kv = device_pool(cuda, shape.kv_layers("float32"), blocks, SIZE)
        forward = TritonForward(on_device(Decoder(shape), cuda), device_kv.planes, shape.max_position)
        forward.warm_up(BUDGET, GraphSizes.up_to(8, longest, BUDGET) if graphs else None)
        kv = KVCacheManager(BlockAllocator(blocks, SIZE), "model")
        decode = DecodeScheduler(kv, max_model_len=longest)
        prefill = PrefillScheduler(kv, then=decode.add)
        limits = StepLimits(
            max_num_batched_tokens=BUDGET, max_num_seqs=8, max_model_len=longest, eos_token_ids=frozenset()
        )
        engine = OverlapEngine(ModelRunner(forward, shape, SIZE, DEVICE), kv, [decode, prefill], limits)
        for n in range(3):
            prefill.add(make_sequence(kv, [n, n + 1], stays=True, max_tokens=steps + 9, ignore_eos=True))
        engine.step()
        prefill.add(make_sequence(kv, [1] * BUDGET * (steps + 1), stays=True, max_tokens=1))
        while engine.flight is not None:
            engine.step()
        cuda.finish()
        before = cuda.counts.copy()
        for _ in range(steps):
            outputs = engine.step()
            assert outputs is not None and len(outputs) == 3 and prefill.queue, "a step with a prompt"
    return cuda.counts - before


def on_device(model: Decoder, cuda: FakeCuda) -> Decoder:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            held: dict[str, object] = module._parameters  # type: ignore[assignment]
            held[name] = cuda.adopted(parameter.detach())
    return model
