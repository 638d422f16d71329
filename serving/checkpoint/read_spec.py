"""What a model is like, read from its folder or file without its weights: for those who route to it and load nothing.

It needs no torch, unless a GGUF file stores rope factors as tensors.
"""

from __future__ import annotations

from pathlib import Path

from serving.checkpoint.gguf_file import GgufFile
from serving.checkpoint.gguf_spec import spec_from_gguf
from serving.checkpoint.json_file import read_json
from serving.model.hf_config import spec_from_hf
from serving.model.spec import ModelSpec


def read_spec(path: Path) -> ModelSpec:
    """Of the Hugging Face folder or GGUF file at `path`. Raises ValueError where its model is not supported."""
    if path.is_file():
        return spec_from_gguf(GgufFile(path))
    generation = path / "generation_config.json"
    given = read_json(generation) if generation.is_file() else None
    return spec_from_hf(read_json(path / "config.json"), given)
