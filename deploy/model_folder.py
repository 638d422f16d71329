"""What a folder written from another model needs beside weights and config.json: tokenizer, template, generation.

Shared by the commands that write models. What the weights are is known below.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Copied as they are from a Hugging Face folder.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def check_new(out: Path) -> None:
    """Raises ValueError where `out` is a file, or a folder with something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a folder that does not, or is empty")


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of the folder `path`, or one made of what the GGUF file `path` says. Raises ValueError."""
    if path.is_dir():
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return config
    from serving.checkpoint.gguf_file import GgufFile
    from serving.checkpoint.gguf_spec import spec_from_gguf
    from serving.quantization.folder import config_from_spec

    file = GgufFile(path)
    spec = spec_from_gguf(file)
    return config_from_spec(spec, float(file.metadata.get(f"{spec.architecture}.rope.freq_base", 10000.0)))


def write_companions(path: Path, config: Mapping[str, Any], out: Path) -> None:
    """Copy what lies beside the weights in the folder `path`, or write it from a GGUF file and its `config`."""
    if path.is_file():
        for name, text in _of_gguf(path, config).items():
            (out / name).write_text(text, encoding="utf-8")
        return
    for name in COMPANIONS:
        if (path / name).is_dir():
            shutil.copytree(path / name, out / name)
        elif (path / name).is_file():
            shutil.copy(path / name, out / name)


def folder_size(out: Path) -> int:
    """Bytes of the files in `out`."""
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def _of_gguf(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    from serving.text.gguf_tokenizer import read_gguf

    parts = read_gguf(path)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
    }
    templates = dict(parts.chat_templates)
    if len(templates) > 1:
        tokenizer_config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        tokenizer_config["chat_template"] = next(iter(templates.values()))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    return {
        "tokenizer.json": parts.backend.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
