"""How a model's hidden states become embeddings, as the files beside its weights say.

`modules.json` and the files it names are those of sentence-transformers; in config.json are fields that vLLM reads too.
A model that says nothing is taken for a causal one: the last token's hidden state, normalized.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.api.settings import EmbeddingForm
from serving.checkpoint.json_file import read_json
from serving.gguf_header import GgufHeader
from serving.messages import Pooling

_MODES = {  # of 1_Pooling/config.json
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_GGUF_MODES = {1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}  # llama.cpp's `pooling_type`; 0: none
_BIDIRECTIONAL = "this model attends to later tokens as well, which is not served"
_SERVED = ("Transformer", "Pooling", "Normalize")  # modules of sentence-transformers


def embedding_form(path: Path, size: int) -> EmbeddingForm:
    """Of the model at `path`, whose hidden states have `size` numbers. Raises ValueError for a file that is no JSON."""
    if path.is_file():
        return _of_gguf(path, size)
    config, modules = _read(path / "config.json"), _modules(path)
    dimensions = _dimensions(config, size)
    refusal = _not_causal(config)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _SERVED]:
        refusal = refusal or f"this model's embeddings go through {unknown[0][:80]!r}, which is not served"
    if "Pooling" not in kinds:
        return EmbeddingForm(size=size, dimensions=dimensions, refusal=refusal)
    pooling = _pooling(path / str(modules[kinds.index("Pooling")].get("path", "")))
    if pooling is None:
        refusal = refusal or "this model pools its hidden states in a way that is not served: cls, mean, lasttoken are"
    return EmbeddingForm(
        size=size,
        pooling=pooling or Pooling.LAST,
        normalize="Normalize" in kinds,
        dimensions=dimensions,
        refusal=refusal,
    )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _modules(path: Path) -> list[dict[str, Any]]:
    file = path / "modules.json"
    if not file.is_file():
        return []
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{file} is no list of modules")
    return modules


def _pooling(folder: Path) -> Pooling | None:
    """The one mode that is on; None for others, and for several, whose vectors would be joined."""
    config = _read(folder / "config.json")
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return _MODES.get(on[0]) if len(on) == 1 else None


def _dimensions(config: dict[str, Any], size: int) -> tuple[int, ...] | None:
    """What embeddings may be cut to, as the model was trained: fields of config.json that vLLM reads too."""
    named = config.get("matryoshka_dimensions")
    if isinstance(named, list) and named:
        whole = {number for number in named if isinstance(number, int) and not isinstance(number, bool)}
        return tuple(sorted(number for number in whole if 0 < number <= size)) or None
    return () if config.get("is_matryoshka") is True else None


def _not_causal(config: dict[str, Any]) -> str:
    """Why the model's attention is not the one that is computed here; empty where it is."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if part.get("is_causal") is False or part.get("use_bidirectional_attention") is True:
            return _BIDIRECTIONAL
    return ""


def _of_gguf(path: Path, size: int) -> EmbeddingForm:
    """llama.cpp normalizes what it answers, however it was pooled."""
    metadata = GgufHeader(path).metadata
    name = metadata.get("general.architecture")
    mode = metadata.get(f"{name}.pooling_type") or 3
    pooling = _GGUF_MODES.get(mode) if isinstance(mode, int) else None
    refusal = "" if pooling is not None else f"this model's pooling type {mode} is not served"
    if metadata.get(f"{name}.attention.causal") is False:
        refusal = _BIDIRECTIONAL
    return EmbeddingForm(size=size, pooling=pooling or Pooling.LAST, refusal=refusal)
