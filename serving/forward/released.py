"""Gives up the weights of linear layers that kernels hold in a form of their own, so that they are not held twice.

What is left of a layer are shapes and types on torch's meta device; whoever computes or packs by it is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

REFUSAL = "the weights of this layer were given up when the kernels took them over: load the model again"


def release(linear: nn.Module) -> None:
    """Give up a layer's own parameters. One that another layer shares, as a head the embedding, stays with that."""
    for name, parameter in list(linear.named_parameters(recurse=False)):
        shape_only = torch.empty_like(parameter, device="meta")
        setattr(linear, name, nn.Parameter(shape_only, requires_grad=False))
    linear.register_forward_pre_hook(_refuse)


def held(weight: Tensor) -> Tensor:
    """`weight`, which has values. Raises RuntimeError where they were given up."""
    if weight.is_meta:
        raise RuntimeError(REFUSAL)
    return weight


def _refuse(linear: nn.Module, given: tuple[object, ...]) -> None:
    raise RuntimeError(REFUSAL)
