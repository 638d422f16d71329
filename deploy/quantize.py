"""`millrace quantize MODEL OUT`: a folder of INT8 weights that loads without calibration, here and elsewhere.

It brings the parts together: the quantized model, its config, its tokenizer. What INT8 means is known below.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deploy.model_folder import check_new, folder_size, read_config, write_companions


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
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="every linear of every layer in INT8, with Hadamard transforms of inputs that are computed as they come:"
        " quicker on a CPU here, and not for systems or kernels without them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Quantize and write; the process's exit code. Raises ValueError for a model or a place that will not do."""
    # Imported on use: the other commands need not wait for torch.
    from serving.checkpoint.hub import resolve
    from serving.loader.loading import load
    from serving.quantization.folder import write_model
    from serving.quantization.scheme import PORTABLE, ROTATED

    out: Path = arguments.out
    check_new(out)
    path = resolve(arguments.model)
    config = read_config(path)
    if "quantization_config" in config:
        raise ValueError(f"{path} is quantized already")
    started = time.monotonic()
    scheme = ROTATED if arguments.rotate else PORTABLE
    loaded = load(path, arguments.dtype, quantization="int8", scheme=scheme)
    out.mkdir(parents=True, exist_ok=True)
    write_model(loaded.model, config, out)
    write_companions(path, config, out)
    size = folder_size(out) / 2**20
    print(f"wrote {out} ({size:.0f} MiB) in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return 0
