"""Every sampling backend: torch, and each form of the compiled kernels this CPU runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.kernels import cpu
from serving.sampling import torch_sampling as by_torch
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.sampler import Sampler, SamplingBackend
from serving.sampling.torch_sampling import TorchSampling

FORMS = cpu.forms(library) if (library := cpu.shared_library()) is not None else []


@pytest.fixture(scope="module", params=["torch", "torch with few candidates", *FORMS])
def backend(request: pytest.FixtureRequest) -> Iterator[SamplingBackend]:
    if request.param.startswith("torch"):
        with pytest.MonkeyPatch.context() as patch:
            if request.param != "torch":
                patch.setattr(by_torch, "CANDIDATES", 3)
            yield TorchSampling()
        return
    kernels = cpu.load(threads=2, form=request.param)
    assert kernels is not None
    yield CpuSampling(kernels)
    kernels.close()


@pytest.fixture(scope="module")
def sampler(backend: SamplingBackend) -> Sampler:
    return Sampler(backend)


@pytest.fixture(scope="module")
def border(backend: SamplingBackend) -> float:
    """How near to a border between two tokens a choice may fall on the other side."""
    return 1e-9 if isinstance(backend, TorchSampling) else 2e-6
