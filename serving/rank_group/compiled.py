"""A rank's part of a step by the compiled CPU kernels: one call, within which rows travel to other ranks and back.

Attention, dense layers, norms, routing, the experts here and the head are those of the compiled step of one process,
and so are the bits: rows travel as experts multiply them, and results in float32. A rank that is lost meanwhile is
found out by the exchange, and the call leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.expert_parallel.exchange import ExpertExchange
from serving.expert_parallel.expert_statistics import LayerCounts
from serving.expert_parallel.layer import ExpertParallelMlp, moe_layers
from serving.expert_parallel.packed_expert import PackedExpert
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.forward.choose import AS_ASKED, cpu_kernels
from serving.forward.cpu_forward import supports
from serving.forward.layer_events import LayerDone
from serving.forward.llama_shape import gated_weights, linear_weights
from serving.forward.packing import decoder_of, pack_linear, packed_layers
from serving.forward.step_progress import StepProgress
from serving.kernels import cpu
from serving.kernels.cpu.offloaded_step import offloaded_step
from serving.kernels.layer_weights import ExpertSpread, MlpWeights, MoeWeights
from serving.loader.loading import LoadedModel
from serving.malloc import give_back_memory
from serving.model.decoder import Decoder, Planes
from serving.model.gated_mlp import GatedMlp
from serving.rank_group.messages import CompiledForm
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.sampler import Sampler


def unlike_compiled(loaded: LoadedModel) -> str | None:
    """Why the compiled kernels cannot compute a rank's share of a model, or None if they can."""
    if (reason := supports(loaded.model, loaded.dtype)) is not None:
        return reason
    wires = _wires(loaded.model)
    if len(wires) > 1:
        return "rows travel in one type to the experts of all layers, of which some are INT8 and others are not"
    if loaded.spec.hidden * max(wire.itemsize for wire in wires) % 4:
        return f"rows of {loaded.spec.hidden} numbers do not travel as experts multiply them"
    return None


def _wires(model: Decoder) -> set[torch.dtype]:
    """What the first layers of a share's experts multiply."""
    experts = (expert for _, mlp in moe_layers(model) for expert in mlp.experts.children())
    return {linear_weights(expert.gate_up).weight.dtype for expert in experts if isinstance(expert, GatedMlp)}


def compiled_form(loaded: LoadedModel, config: EngineConfig, max_position: int) -> CompiledForm | str:
    """What the ranks of a group are to compute with, or why by torch. `loaded` is the leader's share.

    Raises ValueError for a form of the kernels that this CPU does not run.
    """
    if config.kernels == "torch":
        return AS_ASKED
    if (reason := unlike_compiled(loaded)) is not None:
        return reason
    kernels = cpu_kernels(config, torch.get_num_threads())
    if kernels is None:
        return "they could not be built"
    (wire,) = _wires(loaded.model)
    form = CompiledForm(form=kernels.form, wire=str(wire).removeprefix("torch."), max_position=max_position)
    kernels.close()
    return form


def compiled_computing(model: Decoder, form: CompiledForm, *, leads: bool) -> CompiledComputing:
    """With as many threads as torch has now. Raises ValueError where this rank cannot compute so."""
    kernels = cpu.load(threads=torch.get_num_threads(), form=form.form)
    if kernels is None:
        raise ValueError("the kernels could not be built here: choose --kernels torch")
    return CompiledComputing(model, kernels, form, leads=leads)


class CompiledComputing:
    """Of a rank (computing.RankComputing). The weights of `model`, its share, go as the kernels take them over."""

    def __init__(self, model: Decoder, kernels: cpu.Kernels, form: CompiledForm, *, leads: bool) -> None:
        """Raises ValueError where experts are sent rows of another type."""
        self.form, self._leads = f"cpu-{kernels.form}", leads
        self.model, self.kernels = model, kernels
        self._wire: torch.dtype = getattr(torch, form.wire)
        self._make = decoder_of(model, kernels, form.max_position, releases=True, has_head=leads)
        for _, mlp in moe_layers(model):
            packed = {name: self.expert(expert) for name, expert in mlp.experts.named_children()}
            mlp.experts = nn.ModuleDict(packed)  # type: ignore[assignment]
        self.layers = packed_layers(model, kernels, releases=True, experts=lambda _: ())
        self.numbers = [number for number, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeWeights)]
        self._mixtures = [layer for layer, _ in moe_layers(model)]
        self._exchange: ExpertExchange | None = None
        self._steps: list[CompiledSteps] = []
        self._head: cpu.CpuDecoder | None = None
        self._logits = torch.empty(0, model.spec.vocab_size)
        torch.set_num_threads(1)  # or torch's idle threads would spin on the cores the kernels compute on
        give_back_memory()  # what packing took, and loading before it

    def expert(self, module: nn.Module) -> nn.Module:
        """Raises ValueError for one that takes rows of another type than travel."""
        pack = partial(pack_linear, self.kernels, True)
        packed = PackedExpert(gated_weights(module, pack, partial(pack, interleaved=True)))
        if packed.wire != self._wire:
            raise ValueError(f"an expert takes rows of {packed.wire}, and {self._wire} travels: choose --kernels torch")
        return packed

    def placed(self) -> None:
        self._head = None  # or it would keep the experts there were
        for layer in range(len(self.numbers)):
            self._take(layer)
        for steps in self._steps:
            steps.placed()

    def moved(self, layer: int) -> None:
        number = self._take(layer)
        for steps in self._steps:
            steps.moved(number)

    def _take(self, layer: int) -> int:
        """The experts of a MoE layer; its number among all layers."""
        number, mlp = self.numbers[layer], self._mixtures[layer].mlp
        before = self.layers[number]
        assert isinstance(mlp, ExpertParallelMlp) and isinstance(before.mlp, MoeWeights)
        self._exchange = mlp.exchange
        self.layers[number] = replace(before, mlp=_experts_of(mlp, before.mlp))
        return number

    def check_rows(self, count: int) -> None:
        """Raises ValueError for more rows than there is room for in a step."""
        assert self._exchange is not None, "experts are placed before steps"
        if count > self._exchange.shape.max_tokens:
            raise ValueError(f"{count} rows in one step, of {self._exchange.shape.max_tokens} that there is room for")

    def check(self) -> None:
        """Raises RankLost once one is, and where this rank has left."""
        if isinstance(self._exchange, SharedMemoryExchange):
            self._exchange.check()

    def over(self, planes: Sequence[Planes]) -> CompiledSteps:
        steps = CompiledSteps(self, planes)
        self._steps.append(steps)
        return steps

    def decoder(self, planes: Sequence[Planes]) -> cpu.CpuDecoder:
        """Of the experts that are placed now."""
        made = self._make(layers=self.layers, kv=[cpu.KvPlanes(*layer) for layer in planes])
        if self._leads:
            self._head = made
        return made

    def new_rows(self, count: int) -> Tensor:
        return torch.empty(count, self.model.spec.hidden)

    def logits(self, rows: Tensor) -> Tensor:
        return self._of_rows(rows, cpu.StepOutput.LOGITS)

    def greedy(self, rows: Tensor) -> Tensor:
        return self._of_rows(rows, cpu.StepOutput.GREEDY)

    def greedy_and_logits(self, rows: Tensor, wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        if len(wanted) > len(self._logits):  # room for them is kept, as by CpuForward
            self._logits = torch.empty(len(wanted), self.model.spec.vocab_size)
        kept = self._logits[: len(wanted)]
        return self._of_rows(rows, cpu.StepOutput.GREEDY, dict(zip(wanted, kept, strict=True))), kept

    def hidden(self, rows: Tensor) -> Tensor:
        return self._of_rows(rows, cpu.StepOutput.HIDDEN)

    def sampler(self) -> Sampler:
        return Sampler(CpuSampling(self.kernels))

    def _of_rows(self, rows: Tensor, output: cpu.StepOutput, kept: Mapping[int, Tensor] | None = None) -> Tensor:
        head = self._head or self.decoder(self._steps[0].planes)  # a first step may have left before any decoder
        return head.head_step(rows, output, kept=kept)


class CompiledSteps:
    """Over some planes. Its decoder is made once experts are placed, and changed as they move."""

    def __init__(self, computing: CompiledComputing, planes: Sequence[Planes]) -> None:
        self._computing, self.planes = computing, planes
        self._decoder: cpu.CpuDecoder | None = None
        self._progress = StepProgress()

    def placed(self) -> None:
        """All layers have new experts from the next step on."""
        self._decoder = None

    def moved(self, number: int) -> None:
        """A layer has, as many as before."""
        if self._decoder is not None:
            self._decoder.put(number, self._computing.layers[number])

    def rows(self, batch: RaggedBatch, written: LayerDone | None) -> Tensor:
        decoder, check = self._ready(), self._computing.check
        self._computing.check_rows(len(batch.tokens))
        if batch.offloaded is not None:

            def told(layer: int) -> None:
                check()  # what a step without a rank writes is no KV
                if written is not None:
                    written(layer)

            found = offloaded_step(decoder, batch, told, cpu.StepOutput.RESIDUAL)
        else:
            with self._progress.told(written) as progress:
                found = decoder.step(batch, cpu.StepOutput.RESIDUAL, progress=progress)
        check()
        return found

    def idle(self) -> None:
        self._ready().idle_step()
        self._computing.check()

    def _ready(self) -> cpu.CpuDecoder:
        self._computing.check()
        if self._decoder is None:
            self._decoder = self._computing.decoder(self.planes)
        return self._decoder


def _experts_of(mlp: ExpertParallelMlp, before: MoeWeights[cpu.PackedLinear]) -> MoeWeights[cpu.PackedLinear]:
    """The experts behind a rank's slots; of a rank that is alone all, in their order."""
    if not isinstance(mlp.exchange, SharedMemoryExchange):
        every = dict(zip(mlp.held, mlp.slots, strict=True))
        return replace(before, experts=_weights([every[expert] for expert in sorted(every)]), spread=None)
    spread = ExpertSpread(
        exchange=mlp.exchange.address,
        copies=mlp.physical.copies,
        physical=mlp.physical.table,
        taken=mlp.count.taken if isinstance(mlp.count, LayerCounts) else None,
    )
    return replace(before, experts=_weights(mlp.slots), spread=spread)


def _weights(experts: Sequence[nn.Module]) -> tuple[MlpWeights[cpu.PackedLinear], ...]:
    found = []
    for expert in experts:
        assert isinstance(expert, PackedExpert)
        found.append(expert.weights)
    return tuple(found)
