"""The Triton kernels in processes of their own: this folder's tests interpreted, and all compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serving.kernels.gpu.conftest import GPU, INTERPRETED

ROOT = Path(__file__).resolve().parents[4]
PARTS = 4

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")


def run(command: list[str], **environment: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def compiled_before(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """Machine code of runs before this one, by Triton's own key: source, types, options and compilers. Whatever is
    found is looked at as what has just been compiled; `pytest --cache-clear` forgets it.
    """
    cache = getattr(pytestconfig, "cache", None)  # none with `-p no:cacheprovider`
    return tmp_path if cache is None else Path(cache.mkdir("triton-for-hopper"))


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="they run in this process")
@pytest.mark.parametrize("part", range(PARTS))
def test_the_kernels_under_the_interpreter(part: int) -> None:
    """In parts: all of them together take minutes, more than one test may where other work has the cores."""
    files = sorted(str(file) for file in Path(__file__).parent.glob("test_*.py"))[part::PARTS]
    run(["pytest", "-q", "-p", "no:cacheprovider", *files], TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="compiling for another machine is for machines without a GPU")
def test_the_kernels_compile_for_hopper(compiled_before: Path) -> None:
    """Without a GPU: to machine code, with the matrix and copy instructions expected, and no register offloaded."""
    run(["tests.serving.kernels.gpu.hopper"], TRITON_CACHE_DIR=str(compiled_before))
