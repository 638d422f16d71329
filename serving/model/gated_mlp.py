"""The gated MLP of most decoders: a layer's own, or one expert of a mixture."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from serving import kernels


class GatedMlp(nn.Module):
    """down(product(gate(x), up(x))), x [T, hidden], by default silu(gate) * up. Rows of `gate_up` are those of gate,
    then of up.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        product: Callable[[Tensor], Tensor] = kernels.silu_mul,
    ) -> None:
        super().__init__()
        self.product = product
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(self.product(self.gate_up(x_TH)))  # type: ignore[no-any-return]
