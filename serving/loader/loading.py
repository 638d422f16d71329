"""Builds a decoder without memory, then fills it tensor by tensor from a checkpoint.

The way from a path to a model that can run. Tokenizers and chat templates are read elsewhere, from the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from serving.checkpoint.checkpoint import DTYPES, Checkpoint, SafetensorsFolder, read_json
from serving.checkpoint.fingerprint import fingerprint
from serving.checkpoint.gguf_file import GgufFile
from serving.checkpoint.gguf_spec import spec_from_gguf
from serving.checkpoint.hub import resolve
from serving.checkpoint.weights import Part, sources
from serving.kernels.torch_linears import use_cpu_linears
from serving.loader.quantize_at_load import quantize
from serving.model.decoder import Decoder
from serving.model.moe import float32_parameters
from serving.model.quantized_linear import hold_int8, own_dtypes
from serving.model.spec import ModelSpec

__all__ = ["LoadedModel", "load", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    model: Decoder
    spec: ModelSpec
    dtype: str  # what the weights are held and computed in
    fingerprint: str  # hex; see `serving.checkpoint.fingerprint`
    path: Path


def load(
    path: Path,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: str | None = None,
    layout: Callable[[Decoder], None] | None = None,
) -> LoadedModel:
    """Load the Hugging Face folder or GGUF file at `path`.

    `dtype` is float32, bfloat16, float16 or auto: the checkpoint's own for a folder, bfloat16 for a GGUF file.
    `quantization` int8 makes its linear layers ones of 8-bit weights and activations, unless its files hold such.
    `layout` takes modules that other ranks hold off the model before it has memory: what they need is not read.
    Raises ValueError when the model is not supported or its files do not fit together.
    """
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"dtype {dtype!r} is not supported; choose auto or one of {', '.join(DTYPES)}")
    spec, checkpoint, own_dtype = open_checkpoint(path)
    if layout is not None and quantization == "int8" and not checkpoint.int8_names:
        raise ValueError("a rank that loads a part of a model cannot quantize it: `millrace quantize` it first")
    dtype = own_dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        model = Decoder(spec)
        hold_int8(model, int8_modules(model, checkpoint))
    every = [name for name, _ in model.named_parameters()]
    if layout is not None:
        layout(model)
    fill(model, checkpoint, DTYPES[dtype], torch.device(device), every)
    if device == "cpu":
        if dtype != "float32":
            use_float32_head(model)
        use_cpu_linears(model)
    digest = fingerprint(spec, checkpoint.files, dtype)
    if quantization == "int8" and not checkpoint.int8_names:
        digest = quantize(model.eval(), path, digest)
    return LoadedModel(model=model.eval(), spec=spec, dtype=dtype, fingerprint=digest, path=path)


def open_checkpoint(path: Path) -> tuple[ModelSpec, Checkpoint, str]:
    """The spec, the tensors and the dtype of the model at `path`, with no weights read yet."""
    if path.is_file():
        file = GgufFile(path)
        return spec_from_gguf(file), file, "bfloat16"
    config, generation = read_json(path / "config.json"), path / "generation_config.json"
    spec = ModelSpec.from_hf_config(config, read_json(generation) if generation.is_file() else None)
    folder = SafetensorsFolder(path)
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return spec, folder, named if named in DTYPES else folder.dtype


def fill(
    model: Decoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, every: Collection[str] = ()
) -> None:
    """Give every parameter of `model`, built on meta, its values out of `checkpoint`, one tensor at a time.

    `every` are the whole model's parameters, where this is a part of one.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    dtypes = own_dtypes(model) | float32_parameters(model)
    found = sources(model.spec, every or shapes, checkpoint.names, checkpoint.container)
    for name in shapes:
        value = read_parameter(checkpoint, name, found[name], shapes[name], dtypes.get(name, dtype), device)
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    model.to(device)  # the rotary frequencies


def read_parameter(
    checkpoint: Checkpoint,
    name: str,
    parts: Sequence[Part],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One parameter, its `parts` stacked by rows. Raises ValueError where they do not fit its shape."""
    value = torch.empty(shape, dtype=dtype, device=device)
    row = 0
    for part in parts:
        tensor = _in_order(_read(checkpoint, part.name, value), part)
        if value.dim() == 1 and tensor.shape[1:] == (1,):  # scales, which are stored as a column
            tensor = tensor[:, 0]
        if tensor.shape[1:] != value.shape[1:] or row + len(tensor) > len(value):
            raise ValueError(
                f"{part.name} has shape {list(tensor.shape)}, which does not fit {name} {list(value.shape)}"
            )
        value[row : row + len(tensor)].copy_(tensor)
        row += len(tensor)
    if row != len(value):
        raise ValueError(f"{' + '.join(part.name for part in parts)} give {row} rows, {name} needs {len(value)}")
    return value


def _read(checkpoint: Checkpoint, name: str, value: Tensor) -> Tensor:
    """Raises ValueError for INT8 that belongs to no quantized layer: its scales would be left out."""
    if name in checkpoint.int8_names and value.dtype != torch.int8:
        raise ValueError(f"{name} is INT8, which is not supported for this tensor; keep it in a float type")
    return checkpoint.read(name)


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


def use_float32_head(model: Decoder) -> None:
    """Let the head compute in float32: scores rounded to 8 bits of mantissa tie, and a tie is a wrong token."""
    model.head_dtype = torch.float32
    model.head.to(torch.float32)
    if model.spec.tied_embeddings:  # `to` has converted the embedding with it: that one keeps the model's type
        model.embed.weight = nn.Parameter(model.embed.weight.to(model.norm.weight.dtype), requires_grad=False)


def _in_order(tensor: Tensor, part: Part) -> Tensor:
    """The part's values as [out, in] rows, each head's halves of rope pairs apart as the decoder has them."""
    if part.transposed:
        tensor = tensor.t()
    if not part.paired_heads:
        return tensor
    heads = tensor.reshape(part.paired_heads, -1, *tensor.shape[1:])
    count = part.paired_rows or heads.shape[1]
    alone, paired = torch.split(heads, [heads.shape[1] - count, count], dim=1)
    halves = paired.reshape(len(heads), -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(paired.shape)
    return torch.cat((alone, halves), dim=1).reshape(tensor.shape)
