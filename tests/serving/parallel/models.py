"""Tiny models of several families on disk, one of them in INT8."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from serving.loader.loading import load
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.folder import write_model
from serving.quantization.scheme import Int8Scheme
from tests.serving.model.oracle import build, configs, save


def written(root: Path, names: Iterable[str]) -> dict[str, Path]:
    """Folders by name; `x_int8` is `x` quantized."""
    found: dict[str, Path] = {}
    for name in names:
        plain = name.removesuffix("_int8")
        if plain not in found:
            found[plain] = save(build(configs()[plain]), root / plain)
        if plain != name:
            found[name] = quantized(found[plain], root / name)
    return found


def quantized(folder: Path, out: Path) -> Path:
    model = load(folder, "float32").model
    out.mkdir()
    scheme = Int8Scheme()
    apply_scales(model, scheme, find_scales(model, scheme, None))
    write_model(model, json.loads((folder / "config.json").read_text()), out)
    return out
