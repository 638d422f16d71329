"""Where this folder's tests run: compiled on a GPU where there is one, else on the CPU through Triton's interpreter.

Triton decides as it is imported whether kernels are interpreted, and other tests import it too. So without a GPU the
tests here run in a process of their own, which `test_own_process.py` starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()

collect_ignore = []
if find_spec("triton") is None or not (INTERPRETED or GPU):
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if file.stem != "test_own_process"]

if INTERPRETED and find_spec("triton") is not None:
    from tests.serving.kernels.gpu.interpreted import prepare_once

    prepare_once()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
