"""A decoder through the Triton kernels against its own modules: scores, tokens and KV, over prompts and decode steps.

Without a GPU they run through Triton's interpreter, in a process of their own (see tests/serving/kernels/gpu/conftest).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache.memory.device import DeviceKV
from serving.batch.layer_barrier import LayerBarrier
from serving.batch.ragged import KVSegment, RaggedBatch
from serving.forward.cuda_graphs import GraphSizes, Size, StaticBatch, Step, replayable
from serving.forward.forward import EagerForward, best_tokens
from serving.kernels.int8 import quantize_rows
from serving.model.decoder import Decoder
from serving.model.quantized_linear import QuantizedLinear
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec
from tests.serving.forward.own_process import interpreted
from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED

BLOCK_SIZE, BLOCKS = 16, 8
TABLES = [[5, 2], [0, 7]]  # of two sequences
DEVICE = torch.device("cuda" if GPU and not INTERPRETED else "cpu")

runs_here = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs in a process of its own, below")


@pytest.fixture(scope="module")
def triton_forward() -> ModuleType:
    pytest.importorskip("triton")
    from serving.forward import triton_forward

    return triton_forward


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of model. `close` is how far its scores may be from the modules': ‖error‖ / ‖scores‖."""

    dtype: str = "float32"
    int8: bool = False
    kv_dtype: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    close: float = 1e-5


SPEC = ModelSpec(
    architecture="llama",
    vocab_size=64,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=48,
    max_position=64,
    norm_eps=1e-5,
    rope=Rope(frequencies=default_frequencies(10000.0, 16)),
)
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
PARTIAL = Rope(frequencies=default_frequencies(10000.0, 8), magnitude=1.2)
LONG = replace(PARTIAL, long_frequencies=default_frequencies(50000.0, 8), long_after=8)

# An int8 may round to either side of a tie; the interpreter truncates to bfloat16.
CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype="bfloat16", close=4e-2),
    "float16": Case(dtype="float16", close=5e-3),
    "int8": Case(int8=True, close=1e-2),
    "int8 in bfloat16 with int8 KV": Case(dtype="bfloat16", int8=True, kv_dtype="int8", close=6e-2),
    "int8 with biases and int8 KV": Case(int8=True, kv_dtype="int8", changes=tuple(BIASES.items()), close=2e-2),
    "norms, windows, biases, partial rope": Case(
        changes=(*BIASES.items(), ("qk_norm", True), ("windows", (5, None)), ("rope", PARTIAL))
    ),
    "norms in int8 over tied embeddings": Case(
        int8=True, changes=(("qk_norm", True), ("tied_embeddings", True)), close=1e-2
    ),
}


def tiny(case: Case) -> Decoder:
    """Random weights, loud in every branch; with `int8`, all linear layers but a tied head are quantized."""
    torch.manual_seed(1)
    model = Decoder(replace(SPEC, **dict(case.changes)))
    for name, parameter in model.named_parameters():
        gain = 3.0 if name.startswith("head") else 1.5
        scale = gain / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 and "embed" not in name else 1.0
        offset = 1.0 if "norm" in name else 0.0
        spread = 0.3 if parameter.dim() == 1 else scale
        parameter.data = (offset + spread * torch.randn(parameter.shape)).to(getattr(torch, case.dtype))
    model.tie_weights()
    if case.int8:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and child.weight is not model.embed.weight:
                    values, scales = quantize_rows(child.weight.detach())
                    setattr(parent, name, QuantizedLinear(values, scales, child.bias))
    return model.eval().to(DEVICE)


class Pair:
    """The same model twice, each over KV of its own, given the same batches."""

    def __init__(self, module: ModuleType, case: Case) -> None:
        self.case = case
        self.model = tiny(case)
        self.vocab = self.model.spec.vocab_size
        specs = self.model.spec.kv_layers(case.kv_dtype or case.dtype)
        self.pools = [DeviceKV(specs, BLOCKS, BLOCK_SIZE, DEVICE) for _ in range(2)]
        assert module.supports(self.model, case.dtype, self.pools[0].planes[0]) is None
        self.kernels = module.TritonForward(self.model, self.pools[0].planes, self.model.spec.max_position)
        self.modules = EagerForward(self.model, self.pools[1].planes)

    @torch.inference_mode()
    def step(self, batch: RaggedBatch) -> Tensor:
        """The modules' scores, after the kernels' have been compared with them."""
        told: list[int] = []
        found = self.kernels.logits(batch, told.append)
        expected = self.modules.logits(batch, None)
        assert told == [0, 1]
        assert found.shape == expected.shape and found.dtype is torch.float32
        assert error(found, expected) < self.case.close
        return expected

    @torch.inference_mode()
    def greedy(self, batch: RaggedBatch, scores: Tensor) -> None:
        """The kernels' tokens are the best of `scores`, or so near to it that rounding decides."""
        tokens = self.kernels.greedy(batch, None)
        again, logits = self.kernels.greedy_and_logits(batch, None, [len(tokens) - 1])
        assert tokens.dtype is torch.int64 and torch.equal(again, tokens)
        assert logits.shape == scores[-1:].shape and torch.equal(logits.argmax(dim=-1), tokens[-1:])
        assert self.case.close >= 1e-4 or torch.equal(tokens, scores.argmax(dim=-1))
        short = scores.amax(dim=-1) - scores.gather(1, tokens[:, None])[:, 0]
        assert (short <= 3 * self.case.close * scores.std()).all()

    def same_kv(self) -> None:
        for mine, theirs in zip(*(device_kv.planes for device_kv in self.pools), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                if one.dtype is torch.int8:
                    assert int((one.int() - other.int()).abs().max()) <= (2 if self.case.dtype == "float32" else 16)
                else:
                    assert other.any() and error(one, other) < max(self.case.close, 1e-6)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def step_of(
    tokens: list[list[int]], starts: list[int], *, tables: list[list[int]] | None = None, **rest: Any
) -> RaggedBatch:
    return RaggedBatch.build(
        tokens=tokens,
        starts=starts,
        block_tables=TABLES if tables is None else tables,
        block_size=BLOCK_SIZE,
        device=DEVICE,
        **rest,
    )


@runs_here
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_decode_steps_are_the_modules(triton_forward: ModuleType, name: str) -> None:
    pair = Pair(triton_forward, CASES[name])
    first, second = [[(7 * i + 3 * s) % pair.vocab for i in range(40)] for s in range(2)]
    pair.step(step_of([first[:13], second[:6]], [0, 0], logits_rows=[12]))
    scores = pair.step(step_of([[first[13]], second[6:15]], [13, 6]))
    for place in range(2):  # the latter begins second's second block
        tokens = scores.argmax(dim=-1).tolist()
        batch = step_of([[tokens[0]], [tokens[1]]], [14 + place, 15 + place])
        scores = pair.step(batch)
    pair.greedy(batch, scores)
    pair.same_kv()


@runs_here
def test_a_chunk_that_nobody_scores_writes_its_kv(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, CASES["float32"])
    assert pair.step(step_of([[1, 2, 3]], [0], tables=TABLES[:1], logits_rows=[])).shape == (0, pair.vocab)
    pair.same_kv()


@runs_here
def test_prompt_rows_are_scored_where_asked(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, CASES["int8"])
    assert len(pair.step(step_of([[1, 2, 3, 4], [9, 8, 7]], [0, 0], logits_rows=[1, 3, 4, 5, 6]))) == 5


@runs_here
@pytest.mark.parametrize(("name", "rows"), [("float32", []), ("int8", [3]), ("bfloat16", [*range(7)])])
def test_hidden_states_are_the_modules(triton_forward: ModuleType, name: str, rows: list[int]) -> None:
    pair, batch = Pair(triton_forward, CASES[name]), step_of([[1, 2, 3, 4], [9, 8, 7]], [0, 0], logits_rows=rows)
    with torch.inference_mode():
        found, expected = pair.kernels.hidden(batch, lambda layer: None), pair.modules.hidden(batch, None)
    assert found.shape == expected.shape == (len(batch.logits_rows), pair.model.spec.hidden)
    assert found.dtype is torch.float32 and error(found, expected) < pair.case.close
    pair.same_kv()


@runs_here
@pytest.mark.parametrize("flags", [[True, False], [False, True]])
def test_long_rope(triton_forward: ModuleType, flags: list[bool]) -> None:
    pair = Pair(triton_forward, Case(changes=(("rope", LONG),)))
    pair.step(step_of([[5] * 9, [6] * 4], [0, 0], long_rope=flags))
    pair.step(step_of([[7], [8]], [9, 4], long_rope=flags))
    pair.same_kv()


@runs_here
def test_padding_changes_no_row_and_writes_nothing(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, CASES["int8 with biases and int8 KV"])
    pair.step(step_of([[1, 2, 3], [4] * 17], [0, 0]))
    batch, size = step_of([[9], [8]], [3, 17]), (4, 32)
    static = StaticBatch(GraphSizes(sequences=(4,), contexts=(32,)), BLOCK_SIZE, DEVICE)
    static.block_tables.fill_(10**6)  # what padding's blocks are must not matter
    static.fill(batch, size)
    before = [plane.clone() for planes in pair.pools[0].planes for plane in planes]
    with torch.inference_mode():
        padded = pair.kernels.logits(static.view(size), None)[:2]
    expected = pair.step(batch)
    assert error(padded, expected) < pair.case.close
    after = [plane.clone() for planes in pair.pools[0].planes for plane in planes]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(2).any(dim=2).nonzero().tolist() if old.dim() > 2 else []
        assert changed == [[5, 3], [7, 1]], "the two new tokens' places and no other"
    with torch.inference_mode():
        pair.kernels.kernels.logits(triton_forward.silent_step((1, 17), BLOCK_SIZE, DEVICE))
    planes = [plane for planes in pair.pools[0].planes for plane in planes]
    assert all(torch.equal(kept, plane) for kept, plane in zip(after, planes, strict=True))


class ReplayedByHand:
    """CudaGraphs on any device: a replay is the step itself, over the same padded memory and into outputs that stay."""

    def __init__(self, step: Step, sizes: GraphSizes, block_size: int, device: torch.device) -> None:
        self.step, self.sizes = step, sizes
        self.static = StaticBatch(sizes, block_size, device)
        self.outputs: dict[Size, tuple[Tensor, ...]] = {}
        self.replayed: list[Size] = []

    def warm_up(self) -> None:
        for size in self.sizes.all():
            self.outputs[size] = self.step(self.static.view(size))

    def __call__(self, batch: RaggedBatch) -> tuple[Tensor, ...] | None:
        size = self.sizes.fit(len(batch.query_lens), max(batch.context_lens_list))
        if not replayable(batch) or size is None:
            return None
        self.replayed.append(size)
        self.static.fill(batch, size)
        for kept, output in zip(self.outputs[size], self.step(self.static.view(size)), strict=True):
            kept.copy_(output)
        return tuple(output[: len(batch.query_lens)] for output in self.outputs[size])


@runs_here
def test_decode_steps_come_from_graphs(triton_forward: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_forward, "CudaGraphs", ReplayedByHand)
    pair = Pair(triton_forward, CASES["int8"])
    pair.kernels.warm_up(16, GraphSizes(sequences=(1, 3), contexts=(16, 32)))
    assert not any(plane.any() for planes in pair.pools[0].planes for plane in planes), "warming up writes no KV"
    graphs = pair.kernels.graphs
    pair.step(step_of([[1, 2, 3], [4] * 17], [0, 0]))
    decode = [step_of([[9], [8]], [3, 17]), step_of([[7], [6]], [4, 18])]
    with torch.inference_mode():
        pair.modules.logits(step_of([[0]], [3], tables=TABLES[:1]), None)
        pair.kernels.logits(decode[0], [].append)
        assert not graphs.replayed, "whoever waits for layers gets them from no graph"
        scores = pair.kernels.logits(decode[0], None)
        tokens = pair.kernels.greedy(decode[0], None)
        kept = scores.clone(), tokens.clone()
        later = pair.kernels.logits(decode[1], None)
        pair.kernels.greedy(decode[1], None)
        alone = pair.kernels.greedy(step_of([[9]], [3], tables=TABLES[:1]), None)
        pair.kernels.logits(step_of([[9]], [32], tables=[[5, 2, 1]]), None)
    assert graphs.replayed == [(3, 32)] * 4 + [(1, 16)]
    assert torch.equal(scores, kept[0]) and torch.equal(tokens, kept[1]), "later steps leave what was returned alone"
    assert error(scores, pair.step(decode[0])) < pair.case.close
    assert torch.equal(tokens, scores.argmax(dim=-1)) and torch.equal(alone, tokens[:1])
    assert error(later, pair.step(decode[1])) < pair.case.close


@runs_here
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_kv_in_blocks_made_for_floats(triton_forward: ModuleType, dtype: str) -> None:
    """Over float blocks full of NaN, kept as INT8: the bits of the same kernels over INT8's own blocks."""
    model = tiny(Case(dtype=dtype))
    own, wide = (DeviceKV(model.spec.kv_layers(kv), BLOCKS, BLOCK_SIZE, DEVICE) for kv in ("int8", dtype))
    for plane in (plane for planes in wide.planes for plane in planes):
        plane.fill_(torch.nan)
    kept = wide.kept_as("int8")
    expected = triton_forward.TritonForward(model, own.planes, model.spec.max_position)
    forward = triton_forward.TritonForward(model, wide.planes, model.spec.max_position).over(kept.planes)
    assert isinstance(forward, triton_forward.TritonForward)
    first = [(5 * i) % 60 for i in range(30)]
    for batch in (
        step_of([first[:13], first[:3]], [0, 0]),
        step_of([first[13:17], [9]], [13, 3]),  # the former begins its second block
        step_of([[1], [2]], [17, 4]),
    ):
        with torch.inference_mode():
            assert torch.equal(forward.logits(batch, None), expected.logits(batch, None))
    slots = own.slots(TABLES[0], 0, 18)
    assert all(map(torch.equal, kept.read(1, slots), own.read(1, slots)))


@runs_here
def test_a_step_waits_at_its_barrier_and_leaves(triton_forward: ModuleType) -> None:
    pair, told, barrier = Pair(triton_forward, CASES["float32"]), [], LayerBarrier()
    batch = step_of([[1, 2, 3]], [16], tables=TABLES[:1], barrier=barrier)
    barrier.open(1)
    barrier.hurry()
    with torch.inference_mode():
        left = pair.kernels.logits(batch, told.append)
    assert barrier.left and told == [0] and left.shape == (1, pair.vocab)
    barrier.begin()
    barrier.open(2)
    pair.step(batch)
    assert not barrier.left


@runs_here
def test_offloaded_kv_is_attended_with_the_rest(triton_forward: ModuleType) -> None:
    pair = Pair(triton_forward, Case(changes=(("max_position", 256),)))

    class Offloaded:
        """128 tokens of KV in host memory, alike in every layer."""

        tokens = 128

        def segments(self) -> Any:
            torch.manual_seed(3)
            yield KVSegment(tuple(torch.randn(2, 1, 128, 2, 16, device=DEVICE)), 0, 128)

    for tokens, start in (([1, 2, 3], 128), ([4], 131)):
        batch = step_of([tokens], [start], tables=TABLES[:1], offloaded=Offloaded())
        pair.greedy(batch, pair.step(batch))
    pair.same_kv()


@runs_here
def test_scores_that_are_no_numbers_give_no_token() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [1.0, torch.nan, 2.0], [torch.inf, 0, 0], [-torch.inf] * 3], device=DEVICE)
    assert best_tokens(scores).tolist() == [1, -1, -1, -1]


@runs_here
@pytest.mark.parametrize(
    ("changes", "dtype", "kv_dtype", "words"),
    [
        ({"norm": "layernorm"}, "float32", "float32", "Llama shape"),
        ({"intermediate": 2**17}, "float32", "float32", "rows of 131072"),
        ({"head_dim": 260}, "float32", "float32", "260 dimensions"),
        ({"head_dim": 20}, "float32", "float32", "attend"),
        ({}, "float32", "float16", "attend"),
        ({"intermediate": 40}, "float32", "float32", "down's 40 inputs"),
    ],
)
def test_what_is_not_supported_is_said(
    triton_forward: ModuleType, changes: dict[str, Any], dtype: str, kv_dtype: str, words: str
) -> None:
    spec = replace(SPEC, **changes)
    with torch.device("meta"):
        model = Decoder(spec)
        for layer in model.layers:
            down = layer.mlp.down
            layer.mlp.down = QuantizedLinear(down.weight.to(torch.int8), down.weight[:, 0])
    planes = DeviceKV(spec.kv_layers(kv_dtype), 1, BLOCK_SIZE).planes
    assert words in (triton_forward.supports(model, dtype, planes[0]) or "")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU or find_spec("triton") is None, reason="runs in this process, or cannot run")
def test_all_of_it_under_the_interpreter() -> None:
    interpreted(__file__, __file__.replace("_forward", "_flashinfer"))
