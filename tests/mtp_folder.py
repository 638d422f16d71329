"""A tiny DeepSeek-V3 with random weights and a layer that predicts further tokens, as a folder on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config

from tests.serving.model.oracle import DEEPSEEK, GROUPS, YARN_MLA, build, save

CONFIG = DEEPSEEK | GROUPS | {"max_position_embeddings": 512, "q_lora_rank": 24, "rope_parameters": YARN_MLA}
NORMS = ("enorm", "hnorm", "shared_head.norm")


def deepseek_with_mtp(folder: Path, *, own_head: bool = False, perfect: bool = False) -> Path:
    """`own_head`: the layer has a head that is not the model's. `perfect`: it predicts what the model will.

    A perfect one stands over a model whose layers add nothing: its next token is a function of the last one alone.
    """
    config = DeepseekV3Config(**CONFIG, num_nextn_predict_layers=1)
    save(build(config), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(1)
    last, hidden = config.num_hidden_layers - 1, config.hidden_size
    layer = {name: value for name, value in tensors.items() if name.startswith(f"model.layers.{last}.")}
    added = {
        name.replace(f"layers.{last}.", f"layers.{last + 1}."): _noise(value, generator)
        for name, value in sorted(layer.items())
    }
    prefix = f"model.layers.{last + 1}"
    added |= {f"{prefix}.{norm}.weight": 1 + 0.2 * torch.randn(hidden, generator=generator) for norm in NORMS}
    added[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    added[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    head = tensors["lm_head.weight"].clone()
    added[f"{prefix}.shared_head.head.weight"] = _noise(head, generator) if own_head else head
    if perfect:
        _make_perfect(tensors | added, tensors, added, prefix, hidden)
    save_file(tensors | added, file, metadata={"format": "pt"})
    return folder


def _make_perfect(
    every: dict[str, Tensor], tensors: dict[str, Tensor], added: dict[str, Tensor], prefix: str, hidden: int
) -> None:
    for name, value in every.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            (added if name in added else tensors)[name] = torch.zeros_like(value)
    ones = torch.ones(hidden)
    for name in (f"{prefix}.enorm.weight", f"{prefix}.hnorm.weight"):
        added[name] = ones.clone()
    added[f"{prefix}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    added[f"{prefix}.eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)


def _noise(value: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(value.shape, generator=generator)
    return noise * 1.3 / value.shape[-1] ** 0.5 if value.ndim >= 2 else value + 0.1 * noise
