"""Every form of the kernels this CPU runs, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serving.kernels import cpu

FORMS = cpu.forms(library) if (library := cpu.shared_library()) is not None else []


@pytest.fixture(params=[(form, threads) for form in FORMS for threads in (1, 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def kernels(request: pytest.FixtureRequest) -> Iterator[cpu.Kernels]:
    form, threads = request.param
    loaded = cpu.load(threads=threads, form=form)
    assert loaded is not None
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _seeded_on_one_torch_thread() -> Iterator[None]:
    """torch's own threads spin after each operation and would take the cores from the kernels' threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
