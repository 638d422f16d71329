"""Builds the library of the CPU kernels ahead of its use, for a package or an image without a compiler.

python -m serving.kernels.cpu.prebuild [FOLDER]      default: beside the sources, where it is looked for
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from serving.kernels.cpu.build import BuildError, compile_library, find_compiler, prebuilt_path


def prebuild(folder: Path | None = None) -> Path:
    """The library's path in `folder`. Raises BuildError where there is no compiler, or it refuses."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++, or name one in CXX")
    target = prebuilt_path()
    target = (folder or target.parent) / target.name
    target.parent.mkdir(parents=True, exist_ok=True)
    compile_library(compiler, target)
    return target


def main(arguments: Sequence[str]) -> None:
    """Build, and print where the library lies."""
    sys.stdout.write(f"{prebuild(Path(arguments[0]) if arguments else None)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
