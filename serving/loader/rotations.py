"""Which INT8 modules of a checkpoint hold weights of transformed inputs, as its config.json says.

It reads no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from serving.checkpoint.checkpoint import Checkpoint
from serving.checkpoint.json_file import read_json
from serving.checkpoint.weights import sources
from serving.model.decoder import Decoder
from serving.model.quantization_config import module_rotations


def stored_rotations(path: Path) -> dict[str, int]:
    """The inputs that are joined at a time, by modules' names in the checkpoint at `path`; nothing for a GGUF file."""
    if path.is_file():
        return {}
    return module_rotations(read_json(path / "config.json").get("quantization_config"))


def refuse_rotations(path: Path) -> None:
    """Raises ValueError, with what to do, where ranks cannot share the model at `path` for its transformed inputs."""
    if stored_rotations(path):
        raise ValueError(
            f"ranks share no weights of transformed inputs, which {path.name} has: write it with `millrace quantize`"
            " without --rotate"
        )


def decoder_rotations(
    model: Decoder, checkpoint: Checkpoint, int8: Collection[str], stored: Mapping[str, int]
) -> dict[str, int]:
    """`stored` by the names of the decoder's modules, which `int8` are. Raises ValueError where they do not fit."""
    left, found = set(stored), {}
    weights = [f"{name}.weight" for name in int8] if stored else []
    for name, parts in sources(model.spec, weights, checkpoint.names, checkpoint.container, all_used=False).items():
        modules = [part.name.removesuffix(".weight") for part in parts]
        block, *others = {stored.get(module, 0) for module in modules}
        width = model.get_parameter(name).shape[1]
        if others or (block and width % block):
            raise ValueError(f"{', '.join(modules)} of {width} inputs are not transformed alike, {block} at a time")
        if block:
            found[name.removesuffix(".weight")] = block
            left -= set(modules)
    if left:
        raise ValueError(f"inputs of {', '.join(sorted(left))} are to be transformed, whose weights are not INT8")
    return found
