"""Llama-shaped models of random weights, to time what a real one of that shape would take.

Their numbers are of the size real ones have; what they say means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from serving.model.decoder import Decoder
from serving.model.moe_spec import MoeSpec
from serving.model.quantized_linear import hold_int8
from serving.model.rope import Rope, default_frequencies
from serving.model.spec import ModelSpec
from serving.quantization.scheme import Int8Scheme

SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "max_position")
SHAPES = {
    "smollm2": dict(zip(SIZES, (576, 30, 9, 3, 64, 1536, 49152, 8192), strict=True)),
    "8b": dict(zip(SIZES, (4096, 32, 32, 8, 128, 14336, 128256, 131072), strict=True)),
    "tiny": dict(zip(SIZES, (32, 2, 2, 1, 16, 64, 100, 1024), strict=True)),
    "mini": dict(zip(SIZES, (64, 2, 4, 2, 16, 128, 384, 2048), strict=True)),  # the least that a server is given
    "paced": dict(zip(SIZES, (512, 2, 4, 2, 64, 1024, 512, 2048), strict=True)),  # of bench.premises
}

# Of Qwen3-30B-A3B, whose layers all have experts.
EXPERTS_30B = MoeSpec(experts=128, top_k=8, intermediate=768, sparse=(True,) * 48)
MIXTURES: dict[str, dict[str, Any]] = {
    "30b-a3b": {
        **dict(zip(SIZES, (2048, 48, 32, 4, 128, 6144, 151936, 40960), strict=True)),
        "qk_norm": True,
        "moe": EXPERTS_30B,
    },
}


def llama(**sizes: Any) -> ModelSpec:
    """Llama 3's architecture in other sizes, or with experts in place of MLPs."""
    rope = Rope(frequencies=default_frequencies(500000.0, sizes["head_dim"]))
    return ModelSpec(architecture="llama", norm_eps=1e-5, rope=rope, **sizes)


def random_model(
    spec: ModelSpec, weights: str, dtype: torch.dtype, device: torch.device, *, kept: str = "head"
) -> Decoder:
    """A decoder whose numbers stay of the size real ones have.

    With `weights` int8 all its linear layers are, but for `kept` and routers; with quantized those that are in what
    `millrace quantize` writes.
    """
    with torch.device("meta"):
        model = Decoder(spec)
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if weights == "int8":
            hold_int8(model, [name for name in linears if name != kept and not name.endswith(".router")])
        elif weights == "quantized":
            hold_int8(model, [name for name in linears if not Int8Scheme().keeps(name, spec.layers)])
    for name, parameter in list(model.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        value = _random(leaf, parameter, spec.hidden, dtype, device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    return model.eval().to(device)


def _random(leaf: str, like: Tensor, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if like.dtype is torch.int8:
        return torch.randint(-127, 128, like.shape, dtype=torch.int8, device=device)
    if leaf == "scale":
        return torch.full(like.shape, hidden**-0.5 / 73, device=device)  # 73: standard deviation of those integers
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=dtype, device=device)
    return torch.randn(like.shape, dtype=dtype, device=device).mul_(like.shape[1] ** -0.5)


def weight_bytes(model: Decoder) -> int:
    """Bytes of weights that a step reads."""
    read = {id(p): p.nbytes for name, p in model.named_parameters() if name != "embed.weight"}
    return sum(read.values()) + (model.embed.weight.nbytes if model.spec.tied_embeddings else 0)


def step_weight_bytes(model: Decoder, rows: int) -> int:
    """Bytes of weights that a step of so many rows reads, if each went to any experts alike."""
    moe = model.spec.moe
    if moe is None:
        return weight_bytes(model)
    routed = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
    return weight_bytes(model) - round(routed * (1 - moe.top_k / moe.experts) ** rows)
