"""Where each parameter of the decoder is found in a checkpoint, for every naming scheme we read.

Names and shapes only; it opens no file. With these a tensor-parallel rank can read its own slices alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from serving.model.quantization_config import SCALE_LEAF, ZERO_POINT_LEAF
from serving.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One checkpoint tensor that becomes rows of a parameter, or is written from them."""

    name: str
    transposed: bool = False  # GPT-2 stores [in, out]
    paired_heads: int = 0  # GGUF's llama stores each of that many heads with the two halves of a rope pair adjacent
    rows: int | None = None  # how many are written; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One family's names: for each of our modules, the checkpoint's modules whose tensors are stacked into it by rows.

    They are written as words; after a `|` come others for checkpoints that lack the first.
    """

    prefixes: tuple[str, ...]  # what may stand before every name but the head's
    layer: str
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    transposed: bool = False
    ignored: tuple[str, ...] = ()  # endings of tensors that are known to carry nothing we need


_LLAMA = Scheme(
    prefixes=("model.", ""),
    layer="layers.{}.",
    outer={"embed": "embed_tokens", "norm": "norm", "head": "lm_head"},
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj | self_attn.qkv_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_up": "mlp.gate_proj mlp.up_proj | mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    },
    ignored=("rotary_emb.inv_freq",),
)

_OPT = Scheme(
    prefixes=("model.decoder.", "decoder."),
    layer="layers.{}.",
    outer={"embed": "embed_tokens", "positions": "embed_positions", "norm": "final_layer_norm", "head": "lm_head"},
    inner={
        "attention_norm": "self_attn_layer_norm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
)

_GPT2 = Scheme(
    prefixes=("transformer.", ""),
    layer="h.{}.",
    outer={"embed": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"},
    inner={
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),  # the causal mask
)

_GGUF = Scheme(
    prefixes=("",),
    layer="blk.{}.",
    outer={"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"},
    inner={
        "attention_norm": "attn_norm",
        "attention.qkv": "attn_q attn_k attn_v | attn_qkv",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "attention.o": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.gate_up": "ffn_gate ffn_up | ffn_up",  # Phi-3 keeps both in ffn_up
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    },
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)

_HUGGING_FACE = {"opt": _OPT, "gpt2": _GPT2}


def sources(
    spec: ModelSpec,
    parameters: Iterable[str],
    present: Collection[str],
    container: Literal["safetensors", "gguf"],
    *,
    all_used: bool = True,
) -> dict[str, tuple[Part, ...]]:
    """For each of the decoder's `parameters`, the tensors of the checkpoint whose rows make it up, in order.

    `present` are the names in the checkpoint. Raises ValueError when one we need is missing, or (with `all_used`) when
    there is one we would not use: a model with unknown parts would run, and answer nonsense.
    """
    scheme = _GGUF if container == "gguf" else _HUGGING_FACE.get(spec.architecture, _LLAMA)
    embed, head = scheme.outer["embed"], scheme.outer["head"]
    prefix = next((prefix for prefix in scheme.prefixes if f"{prefix}{embed}.weight" in present), scheme.prefixes[0])
    found = {name: _parts(name, spec, scheme, prefix, present) for name in parameters}
    used = {part.name for parts in found.values() for part in parts}
    spare = sorted(
        name
        for name in present
        if name not in used
        and not name.endswith((*scheme.ignored, f".{ZERO_POINT_LEAF}"))
        and not (spec.tied_embeddings and name == f"{head}.weight")
    )
    if spare and all_used:
        shown = ", ".join(spare[:4]) + (f" and {len(spare) - 4} more" if len(spare) > 4 else "")
        raise ValueError(f"the checkpoint has tensors that a {spec.architecture} model of this config has not: {shown}")
    return found


def destinations(spec: ModelSpec, parameters: Iterable[str]) -> dict[str, tuple[Part, ...]]:
    """Where each of the decoder's `parameters` goes in a Hugging Face checkpoint, its rows dealt out in this order.

    `sources` reads back what is written so.
    """
    scheme = _HUGGING_FACE.get(spec.architecture, _LLAMA)
    query, key, half = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    rows = {"attention.qkv": (query, key, key), "mlp.gate_up": (half, half)}
    found = {}
    for name in parameters:
        module, leaf, prefix, groups = _named(name, scheme, scheme.prefixes[0])
        group = groups[-1 if spec.architecture == "phi3" else 0]  # Phi-3 keeps in one what others keep apart
        counts = rows[module] if len(group) > 1 else (None,)
        found[name] = tuple(
            Part(name=f"{prefix}{source}.{leaf}", rows=count, transposed=_transposed(module, leaf, scheme))
            for source, count in zip(group, counts, strict=True)
        )
    return found


def _named(name: str, scheme: Scheme, prefix: str) -> tuple[str, str, str, list[list[str]]]:
    """`layers.3.attention.qkv.weight` → the module within its layer, the leaf, the prefix, alternatives of names."""
    module, leaf = name.rsplit(".", 1)
    table = scheme.outer
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        table = scheme.inner
        prefix += scheme.layer.format(layer)
    elif module == "head":
        prefix = ""
    groups = [group.split() for group in table[module].split("|")]
    return module, SCALE_LEAF if leaf == "scale" else leaf, prefix, groups


def _transposed(module: str, leaf: str, scheme: Scheme) -> bool:
    linear = module in ("attention.qkv", "attention.o", "mlp.up", "mlp.down")
    return scheme.transposed and leaf == "weight" and linear


def _parts(name: str, spec: ModelSpec, scheme: Scheme, prefix: str, present: Collection[str]) -> tuple[Part, ...]:
    """`layers.3.attention.qkv.weight` → the three tensors it is stacked from."""
    module, leaf, prefix, groups = _named(name, scheme, prefix)
    alternatives = [[f"{prefix}{source}.{leaf}" for source in group] for group in groups]
    chosen = next((group for group in alternatives if all(tensor in present for tensor in group)), None)
    if chosen is None:
        missing = ", ".join(tensor for tensor in alternatives[0] if tensor not in present)
        raise ValueError(f"the checkpoint lacks {missing}, which a {spec.architecture} model of this config needs")
    paired = scheme is _GGUF and spec.architecture == "llama" and module == "attention.qkv" and len(chosen) == 3
    heads = (spec.heads, spec.kv_heads, 0) if paired else (0,) * len(chosen)
    return tuple(
        Part(name=tensor, transposed=_transposed(module, leaf, scheme), paired_heads=count)
        for tensor, count in zip(chosen, heads, strict=True)
    )
