"""Triton's interpreter, without the quarter of its time that it takes to prepare its language for each inner call."""

from __future__ import annotations

import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter


def prepare_once() -> None:
    """A function that a kernel calls finds the language as the kernel's own launch has prepared it.

    The interpreter looks through all of the language for what is still to be prepared, at every call.
    """
    prepare = interpreter._patch_lang

    def prepared(function: Any) -> Any:
        used = [one for one in function.__globals__.values() if inspect.ismodule(one) and one in LANGUAGES]
        if used and not any(language.core.is_builtin(one.arange) for one in used):
            return interpreter._LangPatchScope()  # nothing to take back
        return prepare(function)

    interpreter._patch_lang = prepared


LANGUAGES = (language, language.core)
