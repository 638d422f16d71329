"""A built decoder of the Llama shape computed by the Triton kernels: steps replay CUDA graphs, or are launched.

It hands the model's own tensors to the kernels, copying none; what they compute is in serving.kernels.gpu, whose
import needs triton. On CUDA no step waits for the device, except with `layer_done`: such a step ends once its last
layer's KV is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor, nn

from serving.batch.device_copy import on_device
from serving.batch.ragged import KVSegment, OffloadedKV, RaggedBatch
from serving.forward.cuda_graphs import CudaGraphs, GraphSizes, Size
from serving.forward.forward import EagerForward, Forward, best_tokens
from serving.forward.layer_events import LayerDone
from serving.forward.llama_shape import gated_weights, layer_weights, linear_weights, norm_weight, rotary_tables
from serving.forward.mixed_graphs import MixedSize
from serving.forward.padding import PADDING_SLOT, static
from serving.kernels import gpu
from serving.kernels.gpu.decoder import StepRanks, TritonDecoder
from serving.kernels.gpu.mixture import ExpertMixture
from serving.kernels.gpu.prompt_choice import FLASHINFER, choose_prompts
from serving.kernels.gpu.prompt_trial import PromptWork
from serving.kernels.gpu.prompts import PromptShape
from serving.kernels.layer_weights import LinearWeights, MlpWeights, MoeWeights
from serving.model.decoder import Decoder, Layer, Planes
from serving.model.fused_shape import unlike_llama
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import QuantizedLinear, float8_linears, rotated_linear
from serving.parallel.rank_module import RankModule, computes_with_others
from serving.parallel.sequence_parallel import AllRows, HeadsToRows, OwnRows, RowsToHeads
from serving.parallel.spread_experts import RowShare, SpreadMoe
from serving.parallel.tensor_parallel import SummedLinear, TensorShare, VocabularyEmbedding, VocabularyHead

log = logging.getLogger(__name__)

WARM_UP_STEPS = ((1, 3), (100,))  # new tokens of sequences: few rows and many, decoding and prompts
OFFLOADED_STEPS = (1, 100)  # new tokens of a sequence


class TritonForward:
    """Runs `model` over `planes` (serving.forward.forward.Forward). Use `supports` first.

    Positions are below `max_position`. What it returns is the caller's own: no later step overwrites it.
    """

    form = "triton"

    def __init__(self, model: Decoder, planes: Sequence[Planes], max_position: int) -> None:
        spec, ranks = model.spec, step_ranks(model)
        embed, head, norm = (own_module(module) for module in (model.embed, model.head, model.norm))
        assert isinstance(embed, nn.Embedding)
        self.model = model
        self.device = embed.weight.device
        self.block_size = planes[0][0].shape[1]
        layers = [layer_weights(layer, norm_weight, _own_weights, linear_weights, _experts) for layer in model.layers]
        self.kernels = TritonDecoder(
            embedding=embed.weight.detach(),
            layers=layers,
            final_norm=norm_weight(norm),
            head=linear_weights(head),
            eps=spec.norm_eps,
            head_dim=spec.head_dim,
            rotation=torch.stack(rotary_tables(spec.rope, max_position, self.device)),
            planes=planes,
            ranks=ranks,
            mixtures={
                at: _mixture(layer, one.mlp)
                for at, (layer, one) in enumerate(zip(model.layers, layers, strict=True))
                if isinstance(one.mlp, MoeWeights)
            },
        )
        self.graphs: CudaGraphs[Size] | None = None
        self.mixed: CudaGraphs[MixedSize] | None = None
        self.launched = self.kernels  # computes the steps that no graph does
        self._warm_for = 0  # tokens of the largest step it has been made ready for
        self._offloads = False  # whether it has been made ready for steps with KV in host memory
        self._modules = EagerForward(model, planes)

    def over(self, planes: Sequence[Planes]) -> Forward:
        """The same kernels over other planes, or the model's modules where these cannot take them.

        Every step is launched. Warmed up if this one is.
        """
        dtype = str(self.kernels.dtype).removeprefix("torch.")
        if supports(self.model, dtype, planes[0]) is not None:
            return self._modules.over(planes)
        other = copy(self)
        other.kernels, other._modules = self.kernels.over(planes), self._modules.over(planes)
        other.graphs = other.mixed = None
        alike = planes[0][0].dtype is self.kernels.planes[0][0].dtype
        other.launched = self.launched.over(planes) if alike else other.kernels
        if self._warm_for:
            other.warm_up(self._warm_for, None)
        if self._offloads:
            other.warm_up_offloaded()
        return other

    def choose_prompts(self, backend: str, most_tokens: int) -> None:
        """Let `backend`, as --attention-backend has it, attend prompts in launched steps of up to so many tokens.

        Raises ValueError for one that cannot be had.
        """
        spec, planes = self.model.spec, self.kernels.planes[0]
        if planes[0].dtype is not self.kernels.dtype:
            if backend == FLASHINFER:
                raise ValueError("--attention-backend flashinfer: it takes no int8 KV; choose --attention-backend auto")
            return
        work = PromptWork(
            shape=PromptShape(
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                block_size=self.block_size,
                dtype=self.kernels.dtype,
            ),
            windows=tuple(layer.window for layer in self.kernels.layers),
            most_tokens=most_tokens,
            longest=self.kernels.rotation.shape[1],
        )
        self.launched = replace(self.kernels, prompts=choose_prompts(backend, work, self.device))

    @torch.inference_mode()
    def warm_up(self, most_tokens: int, graphs: GraphSizes | None) -> None:
        """Compile, tune and capture now, so that no request waits for it: steps of up to `most_tokens` tokens.

        Steps of these sizes are replayed from CUDA graphs; None: of none. Seconds to minutes, the first time.
        """
        log.info("compiling and tuning kernels")
        self._warm_for = most_tokens
        most_rows = most_tokens if graphs is None else max(most_tokens, graphs.sequences[-1])
        if self.kernels.ranks is not None:
            self.kernels.ranks.reserve(most_rows)
        self.kernels.tune(most_rows)
        for counts in WARM_UP_STEPS:
            self.kernels.logits(silent_step(counts, self.block_size, self.device))
        if graphs is not None:
            # All graphs write their logits to the same place: at a size each they would take gigabytes.
            shape = (graphs.sequences[-1], self.model.spec.vocab_size)
            self._logits = static(shape, 0, torch.float32, self.device)
            self.graphs = CudaGraphs(self._captured, graphs, self.block_size, self.device)
            if graphs.mixed is not None:  # first, for theirs are the largest steps
                captures = self.graphs.captures
                self.mixed = CudaGraphs(self._captured, graphs.mixed, self.block_size, self.device, captures)
                self.mixed.warm_up()
            self.graphs.warm_up()

    @torch.inference_mode()
    def warm_up_offloaded(self) -> None:
        """Compile what steps with KV in host memory take as well, decoding and prompts."""
        self._offloads = True
        for count in OFFLOADED_STEPS:
            batch = silent_step((count,), self.block_size, self.device)
            self.kernels.logits(replace(batch, offloaded=SilentSegments(self.kernels.planes)))

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if layer_done is None and (replayed := self._replayed(batch)) is not None:
            return replayed[0].clone()
        return self._launched(batch, layer_done)

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        if layer_done is None and (replayed := self._replayed(batch)) is not None:
            return replayed[1].clone()
        return best_tokens(self._launched(batch, layer_done))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if layer_done is None and (replayed := self._replayed(batch)) is not None:
            logits, tokens = replayed
            return tokens.clone(), logits[on_device(rows, torch.int64, self.device)]
        logits = self._launched(batch, layer_done)
        return best_tokens(logits), logits[on_device(rows, torch.int64, self.device)]

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._launched(batch, layer_done, self.launched.hidden)

    def _replayed(self, batch: RaggedBatch) -> tuple[Tensor, ...] | None:
        """Logits [R, V] and the best token of each row, until the next step; None where no graph computes this one."""
        if self.graphs is None:
            return None
        if self.kernels.ranks is not None:
            self.kernels.ranks.check()  # a graph's exchanges ask nobody
        replayed = self.graphs(batch)
        return self.mixed(batch) if replayed is None and self.mixed is not None else replayed

    def _launched(
        self, batch: RaggedBatch, layer_done: LayerDone | None, compute: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """`compute` is a method of the kernels, `logits` by default."""
        compute = compute or self.launched.logits
        angles = None
        if batch.long_rope is not None:
            assert self.model.rotary is not None
            angles = self.model.rotary(batch)
        if layer_done is None:
            return compute(batch, angles=angles)
        with self._modules.notify_layers(layer_done) as written:
            return compute(batch, angles=angles, written=written)

    def _captured(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """What a graph is captured of: logits [N, V], and the best token of each row."""
        logits = self._logits[: len(batch.logits_rows)]
        logits.copy_(self.kernels.logits(batch))
        return logits, best_tokens(logits)


class SilentSegments(OffloadedKV):
    """For each layer a segment as host memory's are kept (`OffloadedKV`), of zeros; none of the sequence's tokens."""

    tokens = 0

    def __init__(self, planes: Sequence[Planes]) -> None:
        self.layers = iter(planes)

    def segments(self) -> Iterator[KVSegment]:
        layer = next(self.layers)
        tokens = lcm(128, layer[0].shape[1])
        shapes = [(1, tokens, *plane.shape[2:]) for plane in layer]
        staged = [static(shape, 0, plane.dtype, plane.device) for shape, plane in zip(shapes, layer, strict=True)]
        yield KVSegment(tuple(staged), 0, tokens)


def step_ranks(model: Decoder) -> StepRanks | None:
    """What the kernels ask of the other ranks of a model that they can share; None: they cannot, or there are none."""
    return TensorShare.of(model) or RowShare.of(model)


def own_module(module: nn.Module) -> nn.Module:
    """What this rank holds of a module that exchanges with others, or the module itself."""
    match module:
        case VocabularyEmbedding():
            return module.embed
        case VocabularyHead():
            return module.head
        case OwnRows() | AllRows():
            return module.module
        case SummedLinear() | RowsToHeads() | HeadsToRows():
            return module.linear
    return module


def _own_weights(linear: nn.Module) -> LinearWeights:
    """Of a linear that is summed over ranks, this rank's share; the bias is the first rank's to add."""
    own = linear_weights(own_module(linear))
    if not isinstance(linear, SummedLinear):
        return own
    bias = linear.bias if linear.group.rank == 0 else None
    return replace(own, bias=None if bias is None else bias.detach())


def _experts(mlp: MoeMlp) -> tuple[MlpWeights[LinearWeights], ...]:
    """Those that this rank holds."""
    return tuple(gated_weights(expert, linear_weights, linear_weights) for expert in mlp.experts.children())


def _mixture(layer: nn.Module, weights: MoeWeights[LinearWeights]) -> ExpertMixture:
    assert isinstance(layer, Layer)
    if isinstance(layer.mlp, SpreadMoe):
        return ExpertMixture(weights, layer.mlp.held, layer.mlp.exchange)
    return ExpertMixture(weights)


def silent_step(counts: Sequence[int], block_size: int, device: torch.device) -> RaggedBatch:
    """Sequences with so many new tokens, which write no KV and see none."""
    batch = RaggedBatch.build(
        tokens=[[0] * count for count in counts],
        starts=[0] * len(counts),
        block_tables=[[0] * -(-count // block_size) for count in counts],
        block_size=block_size,
        device=device,
    )
    batch.slots.fill_(PADDING_SLOT)
    batch.context_lens.zero_()
    batch.positions.zero_()  # there may be no angles for these
    return batch


def supports(model: Decoder, dtype: str, kv: Planes) -> str | None:
    """Why the kernels cannot run this model over planes like these, or None if they can."""
    if computes_with_others(model) and step_ranks(model) is None:
        return (
            "of models that ranks share, the kernels compute those of shared rows, or shared weights in floats, alone"
        )
    spec, kind = model.spec, getattr(torch, dtype)
    for name, module in model.named_modules():
        if isinstance(module, MoeMlp) and any(isinstance(one, RankModule) for one in module.experts.modules()):
            return f"ranks share the widths of {name}'s experts"
    if reason := unlike_llama(spec):
        return reason
    widest = max(spec.hidden, spec.intermediate, spec.moe.intermediate if spec.moe is not None else 0)
    if not gpu.supports_rows(widest, kind):
        return f"the kernels do not compute rows of {widest} in {dtype}"
    if spec.moe is not None and not gpu.supports_experts(spec.moe.experts):
        return f"the kernels do not route rows among {spec.moe.experts} experts"
    if not gpu.supports_rotary(spec.head_dim, kv[0].dtype):
        return f"the kernels do not write heads of {spec.head_dim} dimensions as {kv[0].dtype}"
    if not gpu.supports_attention(spec.heads, spec.kv_heads, spec.head_dim, kind, kv[0].dtype):
        return (
            f"the kernels do not attend with {spec.heads} heads of {spec.head_dim} dimensions over {spec.kv_heads},"
            f" {dtype} over {kv[0].dtype}"
        )
    if (name := float8_linears(model)) is not None:
        return f"the kernels do not multiply {name}'s FP8 weights"
    if (name := rotated_linear(model)) is not None:
        return f"the Triton kernels do not transform {name}'s inputs before they are quantized"
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and not gpu.supports_linear(module.in_features, module.out_features):
            return f"the kernels do not multiply {name}'s {module.in_features} inputs in INT8"
        if isinstance(module, MoeMlp) and len({_kinds(expert) for expert in module.experts.children()}) > 1:
            return f"of {name}'s experts some are INT8, and the kernels compute all of a layer alike"
    return None


def _kinds(module: nn.Module) -> tuple[type, ...]:
    return tuple(map(type, module.modules()))
