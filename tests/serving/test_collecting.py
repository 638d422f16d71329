"""Python's garbage: none is looked for while modules are imported, and afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from serving.collecting import loading_modules


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    collected = gc.isenabled()
    yield
    (gc.enable if collected else gc.disable)()


@pytest.mark.parametrize("collected", [True, False])
def test_nothing_is_collected_while_modules_are_imported(collected: bool) -> None:
    (gc.enable if collected else gc.disable)()
    with loading_modules():
        assert not gc.isenabled()
    assert gc.isenabled() is collected


def test_a_module_that_cannot_be_imported_changes_nothing() -> None:
    gc.enable()
    with pytest.raises(ImportError), loading_modules():
        raise ImportError("no such module")
    assert gc.isenabled()
