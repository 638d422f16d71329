"""Lets a decoder that holds one rank's share compute with the other ranks: modules at the seams are replaced by ones
that exchange. The decoder's own code does not know.

Whoever drives the ranks gives all of them the same batches in the same order, with KV planes of `model.spec`.
"""

from __future__ import annotations

from itertools import chain

from torch import nn

from serving.expert_parallel.layer import moe_layers
from serving.model.decoder import Attention, Decoder, Layer
from serving.model.gated_mlp import GatedMlp
from serving.model.mla import MlaAttention
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import QuantizedLinear
from serving.model.spec import ModelSpec
from serving.parallel.joining import ParallelRank
from serving.parallel.pipeline_parallel import LastStageLogits, ReceivedLogits, ReceivedStates, SentStates
from serving.parallel.sequence_parallel import AllRows, HeadsToRows, OtherStagesRows, OwnRows, RowsToHeads, StepRows
from serving.parallel.spread_experts import RowExchange, SpreadMoe, wire_type
from serving.parallel.tensor_parallel import SummedMoe, VocabularyEmbedding, VocabularyHead, summed


def apply_parallel(model: Decoder, ranks: ParallelRank) -> Decoder:
    """Connect `model`, left by `holding.hold_share` with what `ranks.rank` holds, to the other ranks; in place.

    Its `spec` becomes this rank's own (`ParallelLayout.rank_spec`): layers and heads, and so KV, are those it has.
    """
    spec = model.spec
    model.layers = nn.ModuleList(model.layers)  # counted from 0 from now on
    if ranks.tensor is not None:
        _share_weights(model, ranks)
    if ranks.pipeline is not None:
        _share_layers(model, ranks)
    if ranks.sequence is not None:
        _share_rows(model, ranks)
    model.spec = ranks.layout.rank_spec(spec, ranks.rank)
    return model


def _share_weights(model: Decoder, ranks: ParallelRank) -> None:
    group, layout, rank, vocabulary = ranks.tensor, ranks.layout, ranks.rank, model.spec.vocab_size
    assert group is not None
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.attention.set_submodule("o", summed(layer.attention.o, group))
        if not isinstance(layer.mlp, MoeMlp):
            layer.mlp.set_submodule("down", summed(layer.mlp.down, group))
        elif not any(isinstance(module, QuantizedLinear) for module in layer.mlp.modules()):
            layer.mlp = SummedMoe(layer.mlp, group)
        else:  # integers are summed before they are scaled, for each expert
            shared = [] if layer.mlp.shared is None else [layer.mlp.shared]
            for expert in chain(layer.mlp.experts, shared):
                assert isinstance(expert, GatedMlp)
                expert.set_submodule("down", summed(expert.down, group))
    if layout.is_first(rank):
        first = layout.vocabulary(model.spec, rank).start
        model.set_submodule("embed", VocabularyEmbedding(model.embed, first, group))
    if layout.is_last(rank):
        model.set_submodule("head", VocabularyHead(model.head, vocabulary, group))


def _share_layers(model: Decoder, ranks: ParallelRank) -> None:
    group = ranks.pipeline
    assert group is not None
    if ranks.previous is not None:
        weight = next(model.layers.parameters())
        model.set_submodule("embed", ReceivedStates(ranks.previous, model.spec.hidden, weight.dtype))
    if ranks.following is None:
        model.set_submodule("head", LastStageLogits(model.head, group))
        return
    model.set_submodule("norm", SentStates(ranks.following))
    model.set_submodule("head", ReceivedLogits(model.spec.vocab_size, group))


def _share_rows(model: Decoder, ranks: ParallelRank) -> None:
    assert ranks.sequence is not None
    rows, spec = StepRows(ranks.sequence), model.spec
    model.set_submodule("embed", OwnRows(model.embed, rows))
    if model.positions is not None:
        model.set_submodule("positions", OwnRows(model.positions, rows))
    each = spec.head_dim if spec.mla is None else spec.mla.value_dim
    members = ranks.layout.sequence_group(ranks.rank)
    widths = [len(ranks.layout.heads(spec, member)) * each for member in members]
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attention = layer.attention
        if isinstance(attention, MlaAttention):
            attention.set_submodule("qkv_a", RowsToHeads(attention.qkv_a, _latent_columns(spec, ranks), rows))
        else:
            assert isinstance(attention, Attention)
            attention.set_submodule("qkv", RowsToHeads(attention.qkv, _head_columns(spec, ranks), rows))
        attention.set_submodule("o", HeadsToRows(attention.o, widths, rows))
    if ranks.layout.spread_experts:
        _spread_experts(model, rows)
    model.set_submodule("norm", (AllRows if ranks.following is None else OtherStagesRows)(model.norm, rows))


def _spread_experts(model: Decoder, rows: StepRows) -> None:
    spec, dtype = model.spec, model.norm.weight.dtype
    assert spec.moe is not None, "the layout has been checked"
    sparse = list(moe_layers(model))
    wire = wire_type((mlp for _, mlp in sparse), dtype)
    exchange = RowExchange(rows, spec.hidden, spec.moe.top_k, wire, dtype)
    for layer, mlp in sparse:
        layer.mlp = SpreadMoe(mlp, exchange)


def _head_columns(spec: ModelSpec, ranks: ParallelRank) -> list[list[range]]:
    """Of the rows of `qkv` that this rank holds, those for the heads of each rank of its sequence group."""
    layout, each = ranks.layout, spec.head_dim
    heads, kv = layout.weight_heads(spec, ranks.rank), layout.weight_kv_heads(spec, ranks.rank)
    found = []
    for member in layout.sequence_group(ranks.rank):
        queries = _columns(layout.heads(spec, member), heads.start, each, 0)
        keys = _columns(layout.kv_heads(spec, member), kv.start, each, len(heads) * each)
        values = _columns(layout.kv_heads(spec, member), kv.start, each, (len(heads) + len(kv)) * each)
        found.append([queries, keys, values])
    return found


def _latent_columns(spec: ModelSpec, ranks: ParallelRank) -> list[list[range]]:
    """`_head_columns` of MLA's `qkv_a`: latents go to all, queries that are not compressed by heads."""
    assert spec.mla is not None
    layout, latent = ranks.layout, spec.mla.kv_rank + spec.mla.rope_dim
    members = layout.sequence_group(ranks.rank)
    if spec.mla.q_rank is not None:
        return [[range(spec.mla.q_rank + latent)] for _ in members]
    each, heads = spec.mla.nope_dim + spec.mla.rope_dim, layout.weight_heads(spec, ranks.rank)
    shared = range(len(heads) * each, len(heads) * each + latent)
    return [[_columns(layout.heads(spec, member), heads.start, each, 0), shared] for member in members]


def _columns(heads: range, first: int, each: int, offset: int) -> range:
    return range((heads.start - first) * each + offset, (heads.stop - first) * each + offset)
