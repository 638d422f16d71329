"""Every way of computing the sampler's choices: torch, and each form of the compiled kernels this CPU runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.engine import selection as by_torch
from serving.engine.compiled_selection import CompiledSelection
from serving.engine.sampling import Sampler, Selection
from serving.engine.selection import TorchSelection
from serving.kernels import cpu

FORMS = cpu.forms(library) if (library := cpu.shared_library()) is not None else []


@pytest.fixture(scope="module", params=["torch", "torch with few candidates", *FORMS])
def selection(request: pytest.FixtureRequest) -> Iterator[Selection]:
    if request.param.startswith("torch"):
        with pytest.MonkeyPatch.context() as patch:
            if request.param != "torch":
                patch.setattr(by_torch, "CANDIDATES", 3)
            yield TorchSelection()
        return
    kernels = cpu.load(threads=2, form=request.param)
    assert kernels is not None
    yield CompiledSelection(kernels)
    kernels.close()


@pytest.fixture(scope="module")
def sampler(selection: Selection) -> Sampler:
    return Sampler(selection)


@pytest.fixture(scope="module")
def border(selection: Selection) -> float:
    """How near to a border between two tokens a choice may fall on the other side."""
    return 1e-9 if isinstance(selection, TorchSelection) else 2e-6
