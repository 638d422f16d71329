"""The gated MLP of most decoders: a layer's own, or one expert of a mixture."""

from __future__ import annotations

from torch import Tensor, nn

from serving import kernels


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), x [T, hidden]. Rows of `gate_up` are those of gate, then of up."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=bias)
        self.down = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x_TH)))  # type: ignore[no-any-return]
