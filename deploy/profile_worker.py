"""`millrace profile`: what a running worker has learned of its steps, as a file that the simulator reads.

It asks a server (GET /v1/workers), and fits nothing itself: workers fit what they see to begin-to-begin times.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from deploy.admin import Server, add_server_arguments
from serving.errors import NotFound

LAYERS, KV_BYTES = 32, 131_072  # of a model of 8 billion parameters with grouped heads, in 16 bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `millrace profile`."""
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the file to write")
    add_server_arguments(parser)
    parser.add_argument("--worker", metavar="NAME", help="which (default: the one that has seen the most steps)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the model (default: {LAYERS})")
    parser.add_argument(
        "--kv-bytes", type=int, default=KV_BYTES, metavar="N", help=f"of a token's KV on the wire (default: {KV_BYTES})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file; the process's exit code. Raises MillraceError, ValueError, OSError."""
    for name in ("layers", "kv_bytes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give a number above 0")
    name, found = profile_in(Server.of(arguments).get("v1", "workers")["workers"], arguments.worker)
    written = {**found, "layers": arguments.layers, "kv_bytes": arguments.kv_bytes}
    arguments.out.write_bytes(orjson.dumps(written, option=orjson.OPT_INDENT_2))
    cost = found["cost"]
    print(f"{name}: {cost['samples']} steps, within {cost['error']:.0%} of what they took; written to {arguments.out}")
    return 0


def profile_in(workers: Sequence[Mapping[str, Any]], wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """A worker's name and what it has measured. Raises NotFound."""
    if wanted is not None and all(worker["name"] != wanted for worker in workers):
        raise NotFound(f"--worker {wanted}: there are {', '.join(worker['name'] for worker in workers) or 'none'}")
    named = [worker for worker in workers if wanted in (None, worker["name"]) and worker.get("measured")]
    if not named:
        raise NotFound("no such worker has measured a step yet: send it some requests first")
    best = max(named, key=lambda worker: worker["measured"]["cost"]["samples"])
    return best["name"], best["measured"]
