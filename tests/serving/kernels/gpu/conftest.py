"""Where this folder's tests run: compiled on a GPU where there is one, else on the CPU through Triton's interpreter.

Triton decides as it is imported whether kernels are interpreted, and other tests import it too. So without a GPU the
tests here run in a process of their own, which `test_own_process.py` starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()

collect_ignore = []
if find_spec("triton") is None or not (INTERPRETED or GPU):
    collect_ignore = ["test_rows.py", "test_linear.py", "test_rotary.py", "test_attention.py", "test_padding.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True, scope="session")
def index_of_scalars() -> Iterator[None]:
    """Let interpreted scalars be loop bounds: Triton 3.6 keeps them as arrays [1], which numpy 2.4 makes no int of."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = original


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
