"""Writes a dense decoder as a mixture of experts that computes the same: every expert a copy of its layer's MLP.

Sparse upcycling (arXiv 2212.05055) without the training that follows it: real text for the ways experts take. Weights
and config.json only; tokenizer files are brought by the caller.

The weights of a token's experts sum to 1, and what they are multiplied with is the same, so the sum is the MLP's
output. With one expert a token its weight is x / x: the same bits. With more, rounding remains (float32: 2e-7).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from serving.checkpoint.checkpoint import DTYPES
from serving.checkpoint.weights import destinations
from serving.loader.loading import fill, open_checkpoint
from serving.model.decoder import Decoder, Layer
from serving.model.hf_config import spec_from_hf
from serving.model.moe_spec import MoeSpec
from serving.model.spec import ModelSpec

ARCHITECTURES = ("llama", "mistral")  # their layers are Mixtral's but for the experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcycling:
    """How many experts a layer gets, how many of them a token takes, and what the routers are drawn from."""

    experts: int
    top_k: int
    seed: int = 0

    def moe(self, spec: ModelSpec) -> MoeSpec:
        """Raises ValueError where a token would take more experts than there are."""
        sparse = (True,) * spec.layers
        return MoeSpec(experts=self.experts, top_k=self.top_k, intermediate=spec.intermediate, sparse=sparse)


def upcycle(
    path: Path,
    config: Mapping[str, Any],
    out: Path,
    how: Upcycling,
    dtype: str = "auto",
    progress: Callable[[int, int], None] = lambda done, layers: None,
) -> None:
    """Write the model at `path`, whose Hugging Face config is `config`, to the folder `out` as Mixtral's architecture.

    `progress` is told how many layers of how many are written. Raises ValueError, before anything is written, for a
    model that is not dense, or of another family than Llama's.
    """
    spec, checkpoint, own_dtype = open_checkpoint(path)
    written = moe_config(spec, config, how)
    if checkpoint.int8_names:
        raise ValueError(f"{path} is quantized; upcycle the model it was made from, then quantize that")
    dtype = own_dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        model = Decoder(spec)
    fill(model, checkpoint, DTYPES[dtype], torch.device("cpu"))
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards(model, how)):
        file = f"model-{number:05}-of-{spec.layers:05}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        progress(number, spec.layers)
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(out / "config.json", written | {"dtype": dtype})  # last: without it the folder is no model


def moe_config(spec: ModelSpec, config: Mapping[str, Any], how: Upcycling) -> dict[str, Any]:
    """The config.json of the upcycled model. What the families' defaults differ in is spelt out.

    Raises ValueError for a model that Mixtral's architecture has no place for.
    """
    if spec.moe is not None:
        raise ValueError(f"this {spec.architecture} model is a mixture of experts already; upcycle a dense one")
    if spec.architecture not in ARCHITECTURES or spec.qkv_bias or spec.o_bias or spec.mlp_bias:
        kind = f"{spec.architecture} with biases" if spec.architecture in ARCHITECTURES else spec.architecture
        raise ValueError(f"Mixtral's architecture has no place for {kind}; upcycle a Llama without biases")
    moe = how.moe(spec)
    written = dict(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "sliding_window": spec.windows[0] if spec.windows else None,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    written.pop("torch_dtype", None)
    parameters = written.get("rope_parameters") or written.get("rope_scaling") or {}
    if "rope_theta" not in parameters:
        written.setdefault("rope_theta", 10000.0)
    meant = replace(spec, architecture="mixtral", moe=moe, eos_token_ids=(), bos_token_id=None)
    if replace(spec_from_hf(written), eos_token_ids=(), bos_token_id=None) != meant:
        raise ValueError(f"no Mixtral config says all of this {spec.architecture} model")
    return written


def shards(model: Decoder, how: Upcycling) -> Iterator[dict[str, Tensor]]:
    """The upcycled checkpoint by names: what lies outside of the layers, then one layer after the other."""
    spec = replace(model.spec, architecture="mixtral", moe=how.moe(model.spec))
    outer = {name: value for name, value in model.named_parameters() if not name.startswith("layers.")}
    if spec.tied_embeddings:
        outer.pop("head.weight", None)
    yield _stored(spec, outer)
    generator = torch.Generator().manual_seed(how.seed)
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        yield _stored(spec, {f"layers.{number}.{name}": value for name, value in _layer(layer, how, generator).items()})


def _layer(layer: Layer, how: Upcycling, generator: torch.Generator) -> dict[str, Tensor]:
    """A dense layer's parameters by the names they have in a sparse one."""
    found: dict[str, Tensor] = {}
    for name, value in layer.named_parameters():
        if name.startswith("mlp."):
            found |= {f"mlp.experts.{i}.{name.removeprefix('mlp.')}": value for i in range(how.experts)}
        else:
            found[name] = value
    # What the norm gives is about as long as its weight: logits of about 1, so that nearby tokens part ways and none
    # of a token's experts counts for nothing.
    weight = layer.mlp_norm.weight
    drawn = torch.randn(how.experts, len(weight), generator=generator) / weight.float().norm()
    return found | {"mlp.router.weight": drawn.to(weight.dtype)}


def _stored(spec: ModelSpec, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the checkpoint that hold `parameters`, each with memory of its own."""
    stored = {}
    for name, parts in destinations(spec, parameters).items():
        value = parameters[name].detach()
        sizes = [len(value) if part.rows is None else part.rows for part in parts]
        for part, rows in zip(parts, torch.split(value, sizes), strict=True):
            stored[part.name] = rows.clone()
    return stored


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
