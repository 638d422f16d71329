"""Generates the Python of serving/proto from its .proto files: messages, their types for mypy, and gRPC stubs.

Run from anywhere as `make proto`; the house tests call `generate` to see that what is checked in is up to date.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = Path("serving/proto")


def sources() -> list[str]:
    """The .proto files, relative to the repository's root: protoc turns these paths into import paths."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / PROTO).glob("*.proto"))]


def generate(out: Path) -> None:
    """Write the generated files below `out`, at the paths their imports expect. Raises ValueError if protoc fails."""
    run(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}")


def descriptors(out: Path) -> None:
    """Write the compiled .proto files to `out` as a FileDescriptorSet."""
    run(f"--descriptor_set_out={out}")


def run(*flags: str) -> None:
    """Call protoc on all sources. The imports of the generated code start at the root: `serving.proto...`.

    In a process of its own: the compiler's library and NIXL's do not live in one.
    """
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *flags, *sources()]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise ValueError(f"protoc ended with status {status}")


def main() -> None:
    generate(ROOT)
    for path in sorted((ROOT / PROTO).glob("*_pb2*")):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
