"""Builds a decoder without memory, then fills it tensor by tensor from a checkpoint.

The way from a path to a model that can run. Tokenizers and chat templates are read elsewhere, from the same path.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from serving.checkpoint.checkpoint import DTYPES, Checkpoint, SafetensorsFolder
from serving.checkpoint.cuts import Cut
from serving.checkpoint.fingerprint import extended, fingerprint
from serving.checkpoint.fused_experts import FusedExperts
from serving.checkpoint.gguf_file import GgufFile
from serving.checkpoint.gguf_spec import spec_from_gguf
from serving.checkpoint.hub import resolve
from serving.checkpoint.json_file import read_json
from serving.checkpoint.read_spec import read_spec
from serving.checkpoint.weights import fuses_experts, sources
from serving.kernels import float8
from serving.kernels.torch_linears import use_cpu_linears
from serving.loader.quantize_at_load import (
    default_scheme,
    kept_scales,
    leaves_any,
    quantize,
    quantized_modules,
)
from serving.loader.reading import fill_parameter
from serving.loader.rotations import decoder_rotations, refuse_rotations, stored_rotations
from serving.model.decoder import Decoder
from serving.model.hf_config import of_text
from serving.model.mla import hold_float32
from serving.model.moe import float32_parameters
from serving.model.quantized_linear import hold_int8, own_dtypes
from serving.model.spec import ModelSpec
from serving.quantization.scheme import Int8Scheme

__all__ = ["LoadedModel", "load", "resolve"]

_log = logging.getLogger("millrace.quantization")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    model: Decoder
    spec: ModelSpec
    dtype: str  # what the weights are held and computed in
    fingerprint: str  # hex; see `serving.checkpoint.fingerprint`
    path: Path
    bytes_read: int = 0  # of the checkpoint's tensors, as they are stored


def load(
    path: Path,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: str | None = None,
    layout: Callable[[Decoder], Mapping[str, Cut] | None] | None = None,
    scheme: Int8Scheme | None = None,
) -> LoadedModel:
    """Load the Hugging Face folder or GGUF file at `path`.

    `dtype` is float32, bfloat16, float16 or auto: the checkpoint's own for a folder, bfloat16 for a GGUF file.
    `quantization` int8 makes its linear layers ones of 8-bit weights and activations, where its files do not hold such
    already: those that `scheme` says, by default all where the fused step of a CPU computes them, and else what any
    kernels multiply.
    `layout` takes off the model, before it has memory, what other ranks hold, and returns which rows and columns are
    left of the parameters it has cut: nothing else is read.
    Raises ValueError when the model is not supported or its files do not fit together.
    """
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"dtype {dtype!r} is not supported; choose auto or one of {', '.join(DTYPES)}")
    spec, checkpoint, own_dtype = open_checkpoint(path)
    if layout is not None and quantization == "int8" and not checkpoint.int8_names:
        raise ValueError("a rank that loads a part of a model cannot quantize it: `millrace quantize` it first")
    if layout is not None and checkpoint.float8:
        raise ValueError("ranks share no FP8 weights: use a checkpoint in BF16 or INT8")
    if layout is not None:
        refuse_rotations(path)
    dtype = own_dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        model = Decoder(spec)
        rotated = hold_stored(model, checkpoint, stored_rotations(path))
    every = [name for name, _ in model.named_parameters()]
    cuts = None if layout is None else layout(model)
    digest = fingerprint(spec, checkpoint.files, dtype)
    if rotated:  # which is said beside the files of tensors
        digest = extended(digest, json.dumps(rotated, sort_keys=True).encode())
    scheme = scheme or default_scheme(spec, device)
    scales = None
    if quantization == "int8" and leaves_any(model, scheme):
        if (kept_wide := _kept_wide(layout is not None, checkpoint)) is None:
            scales = kept_scales(path, digest, spec.max_position, scheme)
        else:
            _log.warning("--quantization int8 compresses no further linear layers of %s: they stay wide", kept_wide)
    later = () if scales is None or scales.stored is None else quantized_modules(model, scales.scheme)
    fill_module = fill(model, checkpoint, DTYPES[dtype], torch.device(device), every, cuts, later)
    hold_float32(model)
    if device == "cpu":
        if dtype != "float32":
            use_float32_head(model)
        use_cpu_linears(model)
    if scales is not None:
        digest = quantize(model.eval(), scales, lambda name: fill_module(name) if name in later else None)
    return LoadedModel(
        model=model.eval(),
        spec=spec,
        dtype=dtype,
        fingerprint=digest,
        path=path,
        bytes_read=checkpoint.bytes_read,
    )


def digest_of(path: Path, dtype: str) -> tuple[str, str]:
    """The fingerprint of the files at `path`, and the dtype that `dtype` means for them; no weights are loaded.

    Raises ValueError as `load`.
    """
    spec, checkpoint, own_dtype = open_checkpoint(path)
    dtype = own_dtype if dtype == "auto" else dtype
    return fingerprint(spec, checkpoint.files, dtype), dtype


def _kept_wide(shared: bool, checkpoint: Checkpoint) -> str | None:
    """Whose linear layers are not compressed as they are loaded; None: this model's are."""
    if shared:
        return "ranks, which hold parts of them"
    return "a folder of FP8" if checkpoint.float8 else None


def open_checkpoint(path: Path) -> tuple[ModelSpec, Checkpoint, str]:
    """The spec, the tensors and the dtype of the model at `path`, with no weights read yet."""
    if path.is_file():
        file = GgufFile(path)
        return spec_from_gguf(file), file, "bfloat16"
    spec, config = read_spec(path), of_text(read_json(path / "config.json"))
    folder = SafetensorsFolder(path)
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = named if named in DTYPES else folder.dtype
    return spec, FusedExperts(folder) if fuses_experts(spec) else folder, dtype


def fill(
    model: Decoder,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    every: Collection[str] = (),
    cuts: Mapping[str, Cut] | None = None,
    later: Collection[str] = (),
) -> Callable[[str], None]:
    """Give every parameter of `model`, built on meta, its values out of `checkpoint`, one tensor at a time.

    `every` are the whole model's parameters, where this is a part of one; `cuts` what it has of those it has in part.
    The linear modules `later` stay on meta in their types: what is returned gives one of them its values, by name.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    dtypes = own_dtypes(model) | float32_parameters(model)
    found = sources(model.spec, every or shapes, checkpoint.names, checkpoint.container)

    def give(name: str, where: torch.device, held: torch.dtype | None = None) -> None:
        value = torch.empty(shapes[name], dtype=dtypes.get(name, dtype), device=where)
        if not value.is_meta:
            fill_parameter(name, value, found[name], checkpoint, (cuts or {}).get(name, Cut()))
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value.to(held or value.dtype), requires_grad=False))

    def fill_module(module: str) -> None:
        for leaf, parameter in list(model.get_submodule(module).named_parameters(recurse=False)):
            give(f"{module}.{leaf}", device, parameter.dtype)  # which may have been changed since

    for name in shapes:
        give(name, torch.device("meta") if name.rpartition(".")[0] in later else device)
    model.tie_weights()
    for rotary in (model.rotary, model.window_rotary):
        if rotary is not None:
            rotary.to(device)  # its frequencies
    return fill_module


def int8_modules(model: Decoder, checkpoint: Checkpoint) -> list[str]:
    """The linear modules whose weights `checkpoint` holds in INT8. Raises ValueError where it does so in part."""
    if not checkpoint.int8_names:
        return []
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if model.spec.tied_embeddings:
        names.remove("head.weight")
    found = []
    for name, parts in sources(model.spec, names, checkpoint.names, checkpoint.container, all_used=False).items():
        held = [part.name for part in parts if part.name in checkpoint.int8_names]
        if held and len(held) < len(parts):
            raise ValueError(f"{', '.join(held)} are INT8 and others of the same layer are not, which is not supported")
        if held:
            found.append(name.removesuffix(".weight"))
    return found


def hold_stored(model: Decoder, checkpoint: Checkpoint, rotations: Mapping[str, int]) -> dict[str, int]:
    """Let `model`, built on meta, hold the 8-bit weights of `checkpoint`. Returns the rotations by its own names."""
    names = int8_modules(model, checkpoint)
    own = decoder_rotations(model, checkpoint, names, rotations)
    hold_int8(model, names, float8.DTYPE if checkpoint.float8 else torch.int8, own)
    return own


def use_float32_head(model: Decoder) -> None:
    """Let the head compute in float32: scores rounded to 8 bits of mantissa tie, and a tie is a wrong token."""
    model.head_dtype = torch.float32
    embedded: Tensor | None = model.embed.weight  # None where another rank embeds tokens
    own = None if embedded is None else embedded.dtype
    model.head.to(torch.float32)
    if model.spec.tied_embeddings and own is not None:  # `to` has converted it with the head: it keeps the model's type
        model.embed.weight = nn.Parameter(model.embed.weight.to(own), requires_grad=False)
