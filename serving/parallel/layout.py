"""Which rank of a group holds what of a model: layers, heads, rows and columns of linears, a slice of the vocabulary.

Pure numbers: no torch, no processes. Shares of unequal size are allowed and differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from serving.kvspec import LayerKV, heads_of
from serving.model.spec import ModelSpec


class RankPlace(NamedTuple):
    """Where a rank stands in each form: its number among those that differ from it in that form alone."""

    stage: int
    sequence: int
    tensor: int


def share(count: int, rank: int, ranks: int) -> range:
    """The part of `count` things that rank `rank` of `ranks` holds."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How many ranks share each layer's weights, the layers, and the tokens of a step.

    Ranks are numbered stage by stage; within a stage by share of the tokens; within that by share of the weights.
    Attention is computed by heads, which `tensor * sequence` ranks share (Ulysses, arXiv 2309.14509): their KV lies as
    that of so many tensor-parallel ranks. With `spread_experts` each of the ranks that share a step's tokens holds some
    experts of every mixture, whole.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    spread_experts: bool = False

    def __post_init__(self) -> None:
        if self.spread_experts and self.ranks > self.sequence:
            raise ValueError("spread_experts is for ranks that share the tokens of a step alone")
        for name in ("tensor", "pipeline", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least one rank is needed")

    @property
    def ranks(self) -> int:
        return self.pipeline * self.sequence * self.tensor

    @property
    def head_ranks(self) -> int:
        """Ranks of a stage, which share its heads."""
        return self.sequence * self.tensor

    def check(self, spec: ModelSpec) -> None:
        """Raises ValueError, which begins with the field that is wrong, where the model cannot be shared out so."""
        if self.pipeline > spec.layers:
            raise ValueError(f"pipeline is {self.pipeline}: the model has {spec.layers} layers")
        for name, ranks in (("tensor", self.tensor), ("sequence", self.head_ranks)):
            if spec.kv_heads >= ranks:
                continue
            unlike = spec.kv_heads % self.tensor and self.tensor % spec.kv_heads
            if ranks % spec.kv_heads or spec.heads % ranks or unlike:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: {ranks} ranks cannot share {spec.heads} attention heads and"
                    f" {spec.kv_heads} key-value heads evenly"
                )
        if self.spread_experts and (spec.moe is None or spec.moe.experts < self.sequence):
            experts = 0 if spec.moe is None else spec.moe.experts
            raise ValueError(f"sequence is {self.sequence}: the model has {experts} experts, and each rank holds one")
        for what, width in self._widths(spec).items():
            if width < self.tensor:
                raise ValueError(f"tensor is {self.tensor}: the model's {what} is {width}")

    def _widths(self, spec: ModelSpec) -> dict[str, int]:
        widths = {"vocabulary": spec.vocab_size, "intermediate width": spec.intermediate}
        if spec.moe is not None:
            widths["experts' intermediate width"] = spec.moe.intermediate
            if spec.moe.shared_intermediate:
                widths["shared experts' intermediate width"] = spec.moe.shared_intermediate
        return widths

    def place(self, rank: int) -> RankPlace:
        """Raises ValueError for a rank that the layout does not have."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        stage, within = divmod(rank, self.head_ranks)
        return RankPlace(stage, *divmod(within, self.tensor))

    def rank(self, place: RankPlace) -> int:
        return (place.stage * self.sequence + place.sequence) * self.tensor + place.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other shares of this rank's weights, itself among them, in their order."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=one)) for one in range(self.tensor))

    def sequence_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same weights and other tokens of a step."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(sequence=one)) for one in range(self.sequence))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same share of other layers, first stage to last."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(stage=one)) for one in range(self.pipeline))

    def layers(self, spec: ModelSpec, rank: int) -> range:
        return share(spec.layers, self.place(rank).stage, self.pipeline)

    def is_first(self, rank: int) -> bool:
        """True if this rank's stage embeds tokens."""
        return self.place(rank).stage == 0

    def is_last(self, rank: int) -> bool:
        """True if this rank's stage makes logits."""
        return self.place(rank).stage == self.pipeline - 1

    def head_rank(self, rank: int) -> int:
        """The number of this rank among the `head_ranks` of its stage, in the order of their heads."""
        place = self.place(rank)
        return place.tensor * self.sequence + place.sequence

    def with_heads_of(self, stage: int, head_rank: int) -> int:
        """The rank of this stage that has the number `head_rank` there."""
        tensor, sequence = divmod(head_rank, self.sequence)
        return self.rank(RankPlace(stage, sequence, tensor))

    def kv_heads(self, spec: ModelSpec, rank: int) -> range:
        """The key-value heads that this rank attends with and keeps; one is held by several ranks where these are more.

        Of MLA, whose latents every rank keeps whole, they are the heads.
        """
        return heads_of(spec.kv_heads, self.head_rank(rank), self.head_ranks)

    def heads(self, spec: ModelSpec, rank: int) -> range:
        """The query heads that this rank attends with: all that share its key-value heads, or its part of them."""
        return _query_heads(spec, self.head_rank(rank), self.head_ranks)

    def weight_kv_heads(self, spec: ModelSpec, rank: int) -> range:
        """The key-value heads that this rank's weights make: those of all ranks of its sequence group."""
        return heads_of(spec.kv_heads, self.place(rank).tensor, self.tensor)

    def weight_heads(self, spec: ModelSpec, rank: int) -> range:
        return _query_heads(spec, self.place(rank).tensor, self.tensor)

    def width(self, width: int, rank: int) -> range:
        """The part of an MLP's intermediate width that this rank computes."""
        return share(width, self.place(rank).tensor, self.tensor)

    def experts(self, spec: ModelSpec, rank: int) -> range:
        """The experts of each mixture that this rank holds, in part or whole; none of a dense model."""
        experts = 0 if spec.moe is None else spec.moe.experts
        return share(experts, self.place(rank).sequence, self.sequence) if self.spread_experts else range(experts)

    def vocabulary(self, spec: ModelSpec, rank: int) -> range:
        """The tokens whose rows of the embedding and of the head this rank holds, where its stage has them."""
        return share(spec.vocab_size, self.place(rank).tensor, self.tensor)

    def rank_spec(self, spec: ModelSpec, rank: int) -> ModelSpec:
        """The model as this rank computes it: its layers, the heads it attends with, its widths; tokens are all."""
        layers = self.layers(spec, rank)
        held, moe = slice(layers.start, layers.stop), spec.moe
        if moe is not None:
            shared = len(self.width(moe.shared_intermediate, rank))
            moe = replace(
                moe,
                intermediate=len(self.width(moe.intermediate, rank)),
                shared_intermediate=shared,
                sparse=moe.sparse[held],
            )
        return replace(
            spec,
            layers=len(layers),
            heads=len(self.heads(spec, rank)),
            kv_heads=len(self.kv_heads(spec, rank)),
            intermediate=len(self.width(spec.intermediate, rank)),
            windows=spec.windows[held],
            moe=moe,
        )

    def kv_layers(self, spec: ModelSpec, rank: int, dtype: str) -> tuple[LayerKV, ...]:
        """What this rank keeps a token, layer by layer of its own."""
        return self.rank_spec(spec, rank).kv_layers(dtype)


def _query_heads(spec: ModelSpec, rank: int, ranks: int) -> range:
    if spec.kv_heads < ranks:
        return share(spec.heads, rank, ranks)
    held, each = heads_of(spec.kv_heads, rank, ranks), spec.heads // spec.kv_heads
    return range(held.start * each, held.stop * each)
