"""Spreads the experts of a built decoder over the ranks of a group, each of which runs its own rows through the rest.

Attention is data-parallel: a rank has its own sequences, and its rows meet those of other ranks at the experts alone. A
rank without work in a step runs an `idle_step`, since the others wait for it in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor, nn

from serving.expert_parallel.exchange import ExchangeShape, ExpertExchange, Received, Rows
from serving.expert_parallel.grouped import grouped
from serving.expert_parallel.packed_expert import PackedExpert
from serving.expert_parallel.physical import PhysicalExperts
from serving.model.decoder import Decoder, Layer
from serving.model.expert_balance import ExpertPlacement
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp, few_alike, route
from serving.model.quantized_linear import QuantizedLinear


class ExpertParallelMlp(MoeMlp):
    """A MoE layer whose experts are held by the ranks of a group. Routing, weights and the sum are those of MoeMlp.

    What comes back is unreduced and summed here in the order of `route`: it has the bits that one process computes.
    """

    def __init__(self, mlp: MoeMlp, placement: ExpertPlacement, exchange: ExpertExchange) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(mlp.__dict__)  # its parameters and modules, whatever the family has
        self.exchange = exchange
        self.physical = PhysicalExperts(placement, exchange.rank)
        held = dict(mlp.experts.named_children())
        self.held = placement.slots[exchange.rank]  # the expert behind each slot
        self._fill([held[str(expert)] for expert in self.held])
        self.count: Callable[[Tensor], object] = _uncounted

    def hold(self, slots: Sequence[nn.Module], physical: PhysicalExperts, placement: ExpertPlacement) -> None:
        """From the next step on this rank has these experts behind its slots; all ranks change alike."""
        self._fill(slots)
        self.physical = physical
        self.held = placement.slots[self.exchange.rank]
        own = zip(self.held, slots, strict=True)
        self.experts = nn.ModuleDict({str(expert): module for expert, module in own})  # type: ignore[assignment]

    def _fill(self, slots: Sequence[nn.Module]) -> None:
        self.slots = list(slots)
        self.together = grouped(slots) if self.exchange.shape.wire is torch.int8 else None

    def mixed(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.count(experts_TK)
        received = self.exchange.dispatch(Rows(x_TH), self.physical.of(experts_TK))
        return self.exchange.combine(self._results(received, x_TH.dtype), weights_TK)

    def idle(self, x_0H: Tensor) -> None:
        """Take part in the others' exchange with no rows of its own, which `x_0H` is the empty tensor of."""
        none_0K = x_0H.new_empty(0, self.exchange.shape.top_k, dtype=torch.float32)
        received = self.exchange.dispatch(Rows(x_0H), none_0K.int())
        self.exchange.combine(self._results(received, x_0H.dtype), none_0K)

    def stages(self, x_TH: Tensor, before: str) -> Generator[str, None, Tensor]:
        """`forward` as a generator, which says what has been computed whenever rows or results begin to travel.

        `before` is what was computed ahead of it. The answer is valid until the layer's exchange is used again.
        """
        experts_TK, weights_TK = route(self.router(x_TH), self.spec, self.correction)
        self.count(experts_TK)
        self.exchange.begin_dispatch(Rows(x_TH), self.physical.of(experts_TK))
        yield before
        self.exchange.begin_combine(self._results(self.exchange.finish_dispatch(), x_TH.dtype))
        yield "experts"
        out_TH = self.exchange.finish_combine(weights_TK)
        if self.shared is not None:
            out_TH += self.shared(x_TH).float()
        return out_TH.to(x_TH.dtype)

    def _results(self, received: Received, dtype: torch.dtype) -> Tensor:
        """What this rank's experts make of the rows received, [N, H], in their order."""
        out = received.results
        if out is None or out.dtype != dtype:
            shape = int(received.counts.sum()), self.exchange.shape.hidden
            out = torch.empty(shape, dtype=dtype, device=received.counts.device)
        return one_by_one(self.slots, received, out) if self.together is None else self.together.results(received, out)


def one_by_one(slots: Sequence[nn.Module], received: Received, out: Tensor) -> Tensor:
    """What the experts behind the slots make of the rows received, by their own modules, in `out` [N, H]."""
    counts, end = received.counts.tolist(), 0
    for portion in received.portions:
        first = end
        for slot in portion.slots:
            begin, end = end, end + counts[slot]
            if begin < end:
                rows = slice(begin - first, end - first)
                out[begin:end] = of_rows(slots[slot], portion.rows, rows, out.dtype)
    return out


def of_rows(expert: nn.Module, portion: Rows, rows: slice, dtype: torch.dtype) -> Tensor:
    """What an expert makes of some of these rows, in `dtype` where they are quantized."""
    if portion.scale is None:
        return few_alike(expert, portion.values[rows])
    return _of_quantized(expert, portion.values[rows], portion.scale[rows], dtype)


def _uncounted(_: Tensor) -> None:
    """Of a layer whose rows nobody counts."""


def _of_quantized(expert: nn.Module, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An INT8 expert of rows that travelled as its first layer would have quantized them."""
    assert isinstance(expert, GatedMlp) and isinstance(expert.gate_up, QuantizedLinear)
    return few_alike(expert.down, expert.product(expert.gate_up.of_quantized(values, scale).to(dtype)))


def hold_experts(model: Decoder, placements: Sequence[ExpertPlacement], rank: int) -> None:
    """Let the MoE layers of `model` have the experts of this rank alone, under the numbers they have in a checkpoint.

    `placements` are those of the MoE layers, first to last. For `serving.loader.loading.load` as its `layout`.
    """
    for (_, mlp), placement in zip(moe_layers(model), placements, strict=True):
        held = sorted(set(placement.slots[rank]))
        every = dict(mlp.experts.named_children())
        mlp.experts = nn.ModuleDict({str(expert): every[str(expert)] for expert in held})  # type: ignore[assignment]


def apply_expert_parallel(model: Decoder, placements: Sequence[ExpertPlacement], exchange: ExpertExchange) -> Decoder:
    """Let the MoE layers of a built `model` send their rows through `exchange`; in place, and returned.

    The model holds the experts of this rank (`hold_experts`), or all. `placements` are those of the MoE layers, first
    to last. Raises ValueError where the exchange has another shape than the model's layers need.
    """
    layers = list(moe_layers(model))
    for (_, mlp), placement in zip(layers, placements, strict=True):
        _check(mlp, placement, exchange.shape)
    for (layer, mlp), placement in zip(layers, placements, strict=True):
        layer.mlp = ExpertParallelMlp(mlp, placement, exchange)
    return model


def idle_step(model: Decoder) -> None:
    """Take part in a step of the other ranks, without rows of its own."""
    weight = model.norm.weight
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.mlp, ExpertParallelMlp):
            layer.mlp.idle(weight.new_empty(0, len(weight)))


def exchange_shape(model: Decoder, placement: ExpertPlacement, max_tokens: int) -> ExchangeShape:
    """The exchange that a built model needs: INT8 on the wire where experts are INT8, else the model's own type.

    Results come back in the model's type, which is the experts' own, and those of packed experts, whom kernels compute
    with, in float32: nothing is rounded on the way. Raises ValueError for a model without MoE layers, or of another
    type than bfloat16 and float32.
    """
    _, mlp = next(moe_layers(model), (None, None))
    if mlp is None or model.spec.moe is None:
        raise ValueError("the model has no experts to spread")
    dtype = model.norm.weight.dtype
    quantized = all(takes_int8(expert) for expert in mlp.experts.children())
    packed = any(isinstance(expert, PackedExpert) for expert in mlp.experts.children())
    return ExchangeShape(
        ranks=len(placement.slots),
        slots=len(placement.slots[0]),
        top_k=model.spec.moe.top_k,
        hidden=model.spec.hidden,
        max_tokens=max_tokens,
        wire=torch.int8 if quantized else dtype,
        back=torch.float32 if packed else dtype,
    )


def moe_layers(model: Decoder) -> Iterator[tuple[Layer, MoeMlp]]:
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.mlp, MoeMlp):
            yield layer, layer.mlp


def takes_int8(expert: nn.Module) -> bool:
    """Whether it quantizes rows before anything else."""
    if isinstance(expert, PackedExpert):
        return expert.wire is torch.int8
    return isinstance(expert, GatedMlp) and isinstance(expert.gate_up, QuantizedLinear)


def check_alike(model: Decoder) -> None:
    """Raises ValueError where only some experts of a layer are INT8: rows travel to all of them in one type."""
    for number, (_, mlp) in enumerate(moe_layers(model)):
        if len({takes_int8(expert) for expert in mlp.experts.children()}) > 1:
            raise ValueError(
                f"some experts of MoE layer {number} are INT8 and others are not, and ranks send rows to all of them in"
                " one type: quantize all experts of a layer, or none, or serve the model without ranks"
            )


def _check(mlp: MoeMlp, placement: ExpertPlacement, shape: ExchangeShape) -> None:
    if (len(placement.slots), len(placement.slots[0])) != (shape.ranks, shape.slots):
        raise ValueError(f"a placement on {len(placement.slots)} ranks does not fit an exchange of {shape.ranks}")
    alike = shape.top_k in (mlp.spec.top_k, 1)  # 1: rows of other hosts come once for each expert
    if placement.experts != mlp.spec.experts or not alike:
        raise ValueError(f"a layer of {mlp.spec.experts} experts does not fit a placement of {placement.experts}")
    if shape.wire is torch.int8 and not all(takes_int8(expert) for expert in mlp.experts.children()):
        raise ValueError("rows travel as int8 to INT8 experts alone: to others they would lose what these compute with")
