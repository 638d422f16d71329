"""`millrace upcycle MODEL OUT`: a dense model as a mixture of experts with the same answers, to try experts on text.

It brings the parts together: the checkpoint with experts, its config, its tokenizer. How one is made is known below.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deploy.model_folder import check_new, folder_size, read_config, write_companions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace upcycle`."""
    parser.add_argument("model", help="a Hugging Face folder, a .gguf file or a hub name of a dense model")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--experts", type=int, required=True, metavar="E", help="experts of each layer, every one a copy of its MLP"
    )
    parser.add_argument(
        "--experts-per-token",
        type=int,
        default=2,
        metavar="K",
        help="experts that a token takes (default: 2); with 1 outputs keep their bits, with more they round",
    )
    parser.add_argument("--seed", type=int, default=0, help="what the routers' weights are drawn from (default: 0)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of what is written (default: the model's own)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Upcycle and write; the process's exit code. Raises ValueError for a model or a place that will not do."""
    # Imported on use: the other commands need not wait for torch.
    from serving.checkpoint.hub import resolve
    from serving.loader.upcycle import Upcycling, upcycle

    out: Path = arguments.out
    check_new(out)
    if not 0 < arguments.experts_per_token <= arguments.experts:
        raise ValueError(f"a token cannot take {arguments.experts_per_token} of {arguments.experts} experts")
    how = Upcycling(experts=arguments.experts, top_k=arguments.experts_per_token, seed=arguments.seed)
    path = resolve(arguments.model)
    config = read_config(path)
    started = time.monotonic()
    upcycle(path, config, out, how, arguments.dtype, _tell)
    write_companions(path, config, out)
    size = folder_size(out) / 2**20
    print(f"wrote {out} ({size:.0f} MiB) in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return 0


def _tell(done: int, layers: int) -> None:
    live = sys.stderr.isatty()
    print(f"layer {done} of {layers} is written", end="\r" if live and done < layers else "\n", file=sys.stderr)
