"""Linear layers made for a CPU give what plain ones give, and stand where those stood."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serving.kernels import torch_linears
from serving.kernels.torch_linears import OneDnnLinear, WidenedLinear, use_cpu_linears


class Network(nn.Module):
    """Linear layers at two depths, one of them tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 24)
        self.inner = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24, bias=False))
        self.head = nn.Linear(24, 24, bias=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_same_results_from_the_same_weights(rows: int, dtype: torch.dtype) -> None:
    """On every CPU: where oneDNN does not compute a dtype, something else does."""
    model = Network().to(dtype)
    tokens = torch.arange(rows) % 24
    with torch.inference_mode():
        before = model(tokens)
        use_cpu_linears(model)
        after = model(tokens)
    kinds = {type(module) for module in (*model.inner, model.head)}
    assert kinds == {OneDnnLinear} or kinds == {WidenedLinear}
    assert model.head.weight is model.embed.weight
    atol, rtol = (1e-4, 1e-5) if dtype is torch.float32 else (4 * torch.finfo(dtype).eps * 40, 0.1)
    torch.testing.assert_close(after, before, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_onednn_sixteen_bits_are_widened(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch_linears, "in_onednn", lambda dtype: False)
    model = Network().to(dtype)
    tokens = torch.arange(7) % 24
    with torch.inference_mode():
        expected = model.double()(tokens)
        model.to(dtype)
        use_cpu_linears(model)
        found = model(tokens)
    assert type(model.head) is WidenedLinear and found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=0.5, rtol=0.05)


def test_without_onednn_float32_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linears, "in_onednn", lambda dtype: False)
    model = Network()
    use_cpu_linears(model)
    assert type(model.head) is nn.Linear


def test_a_dtype_that_the_cpu_does_not_compute_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> Tensor:
        raise RuntimeError(
            "could not create a primitive descriptor for the inner product forward propagation primitive"
        )

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuses)
    assert not torch_linears.in_onednn.__wrapped__(torch.bfloat16)
