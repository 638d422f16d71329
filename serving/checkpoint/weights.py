"""Where each parameter of the decoder is found in a checkpoint, for every naming scheme we read.

Names and shapes only; it opens no file. With these a tensor-parallel rank can read its own slices alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from serving.model.quantization_config import SCALE_LEAF, ZERO_POINT_LEAF
from serving.model.spec import ModelSpec

_LEAVES = {"scale": SCALE_LEAF, "correction": "e_score_correction_bias"}
_EXPERT = re.compile(r"(?<=experts)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One checkpoint tensor that becomes rows of a parameter, or is written from them."""

    name: str
    transposed: bool = False  # GPT-2 stores [in, out]
    paired_heads: int = 0  # in each of that many heads the two halves of a rope pair are stored adjacent
    paired_rows: int | None = None  # only in so many last rows of a head; None: in all
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
    beside: tuple[str, ...] = ()  # beginnings of tensors of other models in the same files


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

_QWEN_MOE = {
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate_up": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
    "mlp.experts.{}.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate_up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.down": "block_sparse_moe.experts.{}.w2",
}
_DEEPSEEK = {
    **_QWEN_MOE,
    "mlp.shared.gate_up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "attention.qkv_a": (
        "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa | self_attn.q_proj self_attn.kv_a_proj_with_mqa"
    ),
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
}
_GPT_OSS = {**_QWEN_MOE, "mlp.router": "mlp.router", "attention": "self_attn"}  # as FusedExperts shows them
_GEMMA3 = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_MTP = {"norm": "shared_head.norm", "head": "shared_head.head"}
_HUGGING_FACE = {
    "opt": _OPT,
    "gpt2": _GPT2,
    "deepseek_v2": replace(_LLAMA, inner={**_LLAMA.inner, **_DEEPSEEK}),
    "deepseek_v3": replace(_LLAMA, inner={**_LLAMA.inner, **_DEEPSEEK}),
    "gemma3": replace(
        _LLAMA,
        prefixes=("language_model.model.", "model.language_model."),
        inner={**_LLAMA.inner, **_GEMMA3},
        beside=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    "gemma3_text": replace(_LLAMA, inner={**_LLAMA.inner, **_GEMMA3}),
    "gpt_oss": replace(_LLAMA, inner={**_LLAMA.inner, **_GPT_OSS}),
    "mixtral": replace(_LLAMA, inner={**_LLAMA.inner, **_MIXTRAL}),
    "qwen3_moe": replace(_LLAMA, inner={**_LLAMA.inner, **_QWEN_MOE}),
}


def fuses_experts(spec: ModelSpec) -> bool:
    """True if a tensor of the family's checkpoints holds all experts of a layer: names here are `FusedExperts`'."""
    return spec.architecture == "gpt_oss"


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
    there is one we would not use: a model with unknown parts would run, and answer nonsense. Layers that predict
    further tokens (`ModelSpec.mtp_layers`) are left out.
    """
    scheme = _GGUF if container == "gguf" else _HUGGING_FACE.get(spec.architecture, _LLAMA)
    embed, head = scheme.outer["embed"], scheme.outer["head"]
    prefix = next((prefix for prefix in scheme.prefixes if f"{prefix}{embed}.weight" in present), scheme.prefixes[0])
    found = {name: _parts(name, spec, scheme, prefix, present) for name in parameters}
    used = {part.name for parts in found.values() for part in parts}
    left_out = tuple(prefix + scheme.layer.format(spec.layers + layer) for layer in range(spec.mtp_layers))
    spare = sorted(
        name
        for name in present
        if name not in used
        and not (left_out and name.startswith(left_out))
        and not name.endswith((*scheme.ignored, f".{ZERO_POINT_LEAF}"))
        and not name.startswith(scheme.beside)
        and not (spec.tied_embeddings and name == f"{head}.weight")
    )
    if spare and all_used:
        shown = ", ".join(spare[:4]) + (f" and {len(spare) - 4} more" if len(spare) > 4 else "")
        raise ValueError(f"the checkpoint has tensors that a {spec.architecture} model of this config has not: {shown}")
    return found


def mtp_sources(spec: ModelSpec, parameters: Iterable[str], present: Collection[str]) -> dict[str, tuple[Part, ...]]:
    """The same for the parameters of a serving.model.mtp.MtpHead, the last of `spec`'s layers.

    A head of its own is left out where there is none. Raises ValueError when anything else is missing.
    """
    scheme, number = _HUGGING_FACE.get(spec.architecture, _LLAMA), spec.layers - 1
    embed = scheme.outer["embed"]
    prefix = next((prefix for prefix in scheme.prefixes if f"{prefix}{embed}.weight" in present), scheme.prefixes[0])
    found = {}
    for name in parameters:
        module, _, rest = name.partition(".")
        if module == "layer":
            found[name] = _parts(f"layers.{number}.{rest}", spec, scheme, prefix, present)
            continue
        tensor = f"{prefix}{scheme.layer.format(number)}{_MTP.get(module, module)}.{rest}"
        if tensor in present:
            found[name] = (Part(name=tensor),)
        elif module != "head":
            raise ValueError(f"the checkpoint lacks {tensor}, which its layer that predicts further tokens needs")
    return found


def destinations(spec: ModelSpec, parameters: Iterable[str]) -> dict[str, tuple[Part, ...]]:
    """Where each of the decoder's `parameters` goes in a Hugging Face checkpoint, its rows dealt out in this order.

    `sources` reads back what is written so.
    """
    scheme = _HUGGING_FACE.get(spec.architecture, _LLAMA)
    query, key, half = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    rows = {"attention.qkv": (query, key, key), "mlp.gate_up": (half, half)}
    if spec.mla is not None:
        rows["attention.qkv_a"] = (spec.mla.q_rank or query, spec.mla.kv_rank + spec.mla.rope_dim)
    if spec.moe is not None:
        rows["mlp.experts.{}.gate_up"] = (spec.moe.intermediate,) * 2
        rows["mlp.shared.gate_up"] = (spec.moe.shared_intermediate,) * 2
    found = {}
    for name in parameters:
        module, leaf, prefix, groups = _named(name, scheme, scheme.prefixes[0])
        # Phi-3 keeps in one what others keep apart; queries of MLA may not be compressed.
        uncompressed = module == "attention.qkv_a" and spec.mla is not None and spec.mla.q_rank is None
        group = groups[-1 if uncompressed or spec.architecture == "phi3" else 0]
        counts = rows[module] if len(group) > 1 else (None,)
        found[name] = tuple(
            replace(
                _part(f"{prefix}{source}.{leaf}", spec, transposed=_transposed(module, leaf, scheme)),
                rows=count,
            )
            for source, count in zip(group, counts, strict=True)
        )
    return found


def _named(name: str, scheme: Scheme, prefix: str) -> tuple[str, str, str, list[list[str]]]:
    """`layers.3.attention.qkv.weight` → the module within its layer, the leaf, the prefix, alternatives of names.

    An expert's number is left out of the module, and put into the names.
    """
    module, leaf = name.rsplit(".", 1)
    table = scheme.outer
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        table = scheme.inner
        prefix += scheme.layer.format(layer)
    elif module == "head":
        prefix = ""
    expert = _EXPERT.search(module)
    if expert is not None:
        module = _EXPERT.sub(".{}.", module)
    names = table[module] if expert is None else table[module].replace("{}", expert[1])
    groups = [group.split() for group in names.split("|")]
    return module, _LEAVES.get(leaf, leaf), prefix, groups


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
    parts = tuple(_part(tensor, spec, transposed=_transposed(module, leaf, scheme)) for tensor in chosen)
    if not paired:
        return parts
    heads = (spec.heads, spec.kv_heads, 0)
    return tuple(replace(part, paired_heads=count) for part, count in zip(parts, heads, strict=True))


def _part(tensor: str, spec: ModelSpec, *, transposed: bool) -> Part:
    """DeepSeek's checkpoints have rope pairs in the last rows of each head of the queries, and of the latent's key."""
    source = tensor.rsplit(".", 2)[-2]
    heads = {"q_proj": spec.heads, "q_b_proj": spec.heads, "kv_a_proj_with_mqa": 1}.get(source, 0)
    if spec.mla is None or not spec.mla.interleaved or not heads:
        return Part(name=tensor, transposed=transposed)
    return Part(name=tensor, transposed=transposed, paired_heads=heads, paired_rows=spec.mla.rope_dim)
