"""`millrace quantize MODEL OUT`: a folder of INT8 weights that loads without calibration, here and elsewhere.

It brings the parts together: the quantized model, its config, its tokenizer. What INT8 means is known below.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace quantize`."""
    parser.add_argument("model", help="a Hugging Face folder, a .gguf file or a hub name")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of what is not quantized (default: the model's own)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Quantize and write; the process's exit code. Raises ValueError for a model or a place that will not do."""
    # Imported on use: the other commands need not wait for torch.
    from serving.checkpoint.hub import resolve
    from serving.loader.loading import load
    from serving.quantization.folder import write_model

    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a folder that does not, or is empty")
    path = resolve(arguments.model)
    config = json.loads((path / "config.json").read_text(encoding="utf-8")) if path.is_dir() else {}
    if "quantization_config" in config:
        raise ValueError(f"{path} is quantized already")
    started = time.monotonic()
    loaded = load(path, arguments.dtype, quantization="int8")
    companions: dict[str, str] = {}
    if path.is_file():
        config, companions = _of_gguf(path)
    out.mkdir(parents=True, exist_ok=True)
    write_model(loaded.model, config, out)
    for name, text in companions.items():
        (out / name).write_text(text, encoding="utf-8")
    if path.is_dir():
        _copy(path, out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"wrote {out} ({size / 2**20:.0f} MiB) in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return 0


def _copy(source: Path, out: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_dir():
            shutil.copytree(source / name, out / name)
        elif (source / name).is_file():
            shutil.copy(source / name, out / name)


def _of_gguf(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json, and the contents of the files beside it, from what the GGUF file says."""
    from serving.checkpoint.gguf_file import GgufFile
    from serving.checkpoint.gguf_spec import spec_from_gguf
    from serving.quantization.folder import config_from_spec
    from serving.text.gguf_tokenizer import read_gguf

    file = GgufFile(path)
    spec = spec_from_gguf(file)
    theta = float(file.metadata.get(f"{spec.architecture}.rope.freq_base", 10000.0))
    config = config_from_spec(spec, theta)
    parts = read_gguf(path)
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_position,
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
    }
    templates = dict(parts.chat_templates)
    if len(templates) > 1:
        tokenizer_config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif templates:
        tokenizer_config["chat_template"] = next(iter(templates.values()))
    generation = {"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids)}
    return config, {
        "tokenizer.json": parts.backend.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
