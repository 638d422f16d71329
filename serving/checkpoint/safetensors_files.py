"""Which safetensors files of a Hugging Face folder hold its tensors, and whether they can be opened.

It needs no torch, and knows nothing of what the tensors are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from serving.checkpoint.json_file import read_json


def check_weights(path: Path) -> None:
    """Raises ValueError where `path` is a folder without safetensors, or a file of them is missing or damaged.

    A GGUF file is one with its metadata, and checked as that is read.
    """
    if path.is_dir():
        for file in set(tensor_files(path).values()):
            opened(file, "numpy")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name → file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        hint = ""
        if any(folder.glob("pytorch_model*.bin")):
            hint = "; its pytorch_model.bin is not read: save the model again with safe_serialization"
        raise ValueError(f"{folder} holds no model.safetensors{hint}")
    return dict.fromkeys(opened(single, "numpy").keys(), single)


def opened(file: Path, framework: Literal["pt", "numpy"]) -> Any:
    """A map of the file. Raises ValueError."""
    try:
        return safe_open(file, framework=framework, device="cpu")
    except FileNotFoundError:
        raise ValueError(f"{file.parent} lists {file.name}, which is not there; download the model again") from None
    except SafetensorError as damage:
        raise ValueError(f"{file} is not a valid safetensors file ({damage}); download it again") from damage
