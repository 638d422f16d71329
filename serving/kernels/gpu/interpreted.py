"""Mends Triton's interpreter, which runs the kernels on the CPU in tests; nothing here matters on a GPU."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def let_scalars_bound_loops() -> None:
    """Give interpreted scalars an index: Triton 3.6 keeps them as arrays [1], which numpy 2.4 makes no int of."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
