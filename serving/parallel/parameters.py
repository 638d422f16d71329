"""Which rows and columns of each of a decoder's parameters a rank holds. Names and numbers only.

A linear layer that makes something for each head, each element of an MLP or each token is cut by rows; the one that
takes these is cut by columns, and what its shares make is summed. Norms, routers and latents' projections are whole.
"""

from __future__ import annotations

import re

from serving.checkpoint.cuts import Cut
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=experts)\.\d+")
_WHOLE = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "mlp.router", "attention.qkv_a")
_WHOLE_NORMS = ("attention.q_norm", "attention.k_norm", "attention.q_a_norm", "attention.kv_a_norm")


def parameter_cut(layout: ParallelLayout, spec: ModelSpec, rank: int, name: str) -> Cut | None:
    """What rank `rank` holds of the parameter; None where it holds nothing of it, an empty Cut where it holds all.

    `name` is the whole decoder's, as `layers.3.attention.qkv.weight`. Raises ValueError for a module that is not known
    here: held whole where it belongs to some heads, it would compute nonsense.
    """
    module, leaf = name.rsplit(".", 1)
    found = _LAYER.match(module)
    if found is None:
        return _outer(layout, spec, rank, module)
    if int(found[1]) not in layout.layers(spec, rank):
        return None
    module = _EXPERT.sub("", module[found.end() :])
    if module in ("attention.o", "mlp.down", "mlp.experts.down", "mlp.shared.down"):
        # A bias, and the scale of each output, belong to the sum.
        return Cut(columns=_inputs(layout, spec, rank, module)) if leaf == "weight" else Cut()
    if f"{module}.{leaf}" == "attention.sinks":
        return Cut(rows=(layout.heads(spec, rank),))
    rows = _outputs(layout, spec, rank, module)
    return Cut(rows=rows)


def _outer(layout: ParallelLayout, spec: ModelSpec, rank: int, module: str) -> Cut | None:
    """The parameters beside the layers. A tied embedding is the head of the last stage, too."""
    first, last = layout.is_first(rank), layout.is_last(rank)
    held = {
        "embed": first or (last and spec.tied_embeddings),
        "positions": first,
        "norm": last,
        "head": last,
    }[module]
    if not held:
        return None
    return Cut(rows=(layout.vocabulary(spec, rank),)) if module in ("embed", "head") else Cut()


def _inputs(layout: ParallelLayout, spec: ModelSpec, rank: int, module: str) -> range:
    if module == "attention.o":
        each = spec.head_dim if spec.mla is None else spec.mla.value_dim
        return _scaled(layout.weight_heads(spec, rank), each)
    return layout.width(_width(spec, module), rank)


def _outputs(layout: ParallelLayout, spec: ModelSpec, rank: int, module: str) -> tuple[range, ...] | None:
    """Rows of a layer's module, or None for one that every rank holds whole."""
    if module == "attention.qkv":
        queries = spec.heads * spec.head_dim
        keys = spec.kv_heads * spec.head_dim
        heads = _scaled(layout.weight_heads(spec, rank), spec.head_dim)
        kv = _scaled(layout.weight_kv_heads(spec, rank), spec.head_dim)
        return heads, _moved(kv, queries), _moved(kv, queries + keys)
    if spec.mla is not None and module.startswith("attention."):
        return _latent_outputs(layout, spec, rank, module)
    if module == "mlp.up":
        return (layout.width(spec.intermediate, rank),)
    if module.endswith(".gate_up"):
        width = _width(spec, module)
        held = layout.width(width, rank)
        return held, _moved(held, width)
    _check_whole(module)
    return None


def _latent_outputs(layout: ParallelLayout, spec: ModelSpec, rank: int, module: str) -> tuple[range, ...] | None:
    """MLA: what makes queries, keys and values of latents makes them for the heads this rank attends with."""
    assert spec.mla is not None
    query, attended = spec.mla.nope_dim + spec.mla.rope_dim, layout.heads(spec, rank)
    if module == "attention.q_b":
        return (_scaled(attended, query),)
    if module == "attention.kv_b":
        return (_scaled(attended, spec.mla.nope_dim + spec.mla.value_dim),)
    if module == "attention.qkv_a" and spec.mla.q_rank is None:
        latent = range(spec.heads * query, spec.heads * query + spec.mla.kv_rank + spec.mla.rope_dim)
        return _scaled(layout.weight_heads(spec, rank), query), latent
    _check_whole(module)
    return None


def _check_whole(module: str) -> None:
    if module not in _WHOLE and module not in _WHOLE_NORMS:
        raise ValueError(f"it is not known how ranks share {module}")


def _width(spec: ModelSpec, module: str) -> int:
    if module.startswith("mlp.experts."):
        assert spec.moe is not None
        return spec.moe.intermediate
    if module.startswith("mlp.shared."):
        assert spec.moe is not None
        return spec.moe.shared_intermediate
    return spec.intermediate


def _scaled(held: range, each: int) -> range:
    return range(held.start * each, held.stop * each)


def _moved(held: range, by: int) -> range:
    return range(held.start + by, held.stop + by)
