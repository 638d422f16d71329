"""Mixture of experts: which experts a token goes to, by what weights, and a layer's MLP made of them.

Shapes: T tokens, H hidden width, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving import kernels
from serving.model.gated_mlp import GatedMlp
from serving.model.moe_spec import MoeSpec

EPSILON = 1e-20  # joins the sum that weights are divided by, as in DeepSeek-V3; softmax's sums it does not change
FEWEST = 4  # rows of a product that torch's libraries compute as they do any number of rows


def route(logits_TE: Tensor, spec: MoeSpec, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts [T, K] int64 of each token, best first, and their weights [T, K] float32.

    Scores are the softmax over all experts: Mixtral (arXiv 2401.04088), Qwen3 (arXiv 2505.09388), DeepSeek-V2 (arXiv
    2405.04434); or the sigmoid of each: DeepSeek-V3 (arXiv 2412.19437). The choice is made by score + `bias_E`, within
    the best groups where experts are grouped. Weights are the scores of the chosen, scaled to a sum of 1 where the
    spec says so, times its factor.
    """
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.softmax(dim=-1) if spec.scoring == "softmax" else kernels.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.groups > 1:
        choice_TE = _within_groups(choice_TE, spec)
    experts_TK = choice_TE.topk(spec.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if spec.normalized:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + EPSILON)
    return experts_TK, weights_TK * spec.scaling


def _within_groups(choice_TE: Tensor, spec: MoeSpec) -> Tensor:
    """The scores, those of experts outside the best groups -inf: not 0, which a negative bias goes below."""
    grouped_TGE = choice_TE.view(len(choice_TE), spec.groups, spec.experts // spec.groups)
    scores_TG = grouped_TGE.topk(spec.group_best, dim=-1).values.sum(dim=-1)
    out_TG = torch.ones_like(scores_TG, dtype=torch.bool)
    out_TG.scatter_(1, scores_TG.topk(spec.top_groups, dim=-1).indices, False)
    return grouped_TGE.masked_fill(out_TG[..., None], float("-inf")).flatten(1)


class Float32Router(nn.Linear):
    """The router's logits, in float32 whatever the model's type, and the bias of the choice where there is one."""

    def __init__(self, hidden: int, spec: MoeSpec) -> None:
        super().__init__(hidden, spec.experts, bias=False)
        self.correction = nn.Parameter(torch.zeros(spec.experts)) if spec.biased else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


def float32_parameters(model: nn.Module) -> dict[str, torch.dtype]:
    """The parameters of routers that stay float32 whatever the model's type."""
    routers = [name for name, module in model.named_modules() if isinstance(module, Float32Router)]
    return {f"{name}.{leaf}": torch.float32 for name in routers for leaf in ("weight", "correction")}


class MoeMlp(nn.Module):
    """The weighted sum of what the chosen experts make of a token, and what the shared experts make of it.

    What a token's experts make of it is added in the order of `route`, in float32: whoever computes them, wherever,
    and whatever else they compute, the sum has the same bits.
    """

    def __init__(self, hidden: int, spec: MoeSpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = (
            Float32Router(hidden, spec) if spec.router_float32 else nn.Linear(hidden, spec.experts, bias=spec.bias)
        )
        product = kernels.silu_mul if spec.product is None else partial(kernels.clamped_swiglu, **asdict(spec.product))
        self.experts = nn.ModuleList(
            GatedMlp(hidden, spec.intermediate, bias=spec.bias, product=product) for _ in range(spec.experts)
        )
        self.shared = GatedMlp(hidden, spec.shared_intermediate) if spec.shared_intermediate else None

    @property
    def correction(self) -> Tensor | None:
        """The bias [E] of the choice of experts, as `route` takes it."""
        return self.router.correction if isinstance(self.router, Float32Router) else None

    def forward(self, x_TH: Tensor) -> Tensor:
        experts_TK, weights_TK = route(self.router(x_TH), self.spec, self.correction)
        out_TH = self.mixed(x_TH, experts_TK, weights_TK)
        if self.shared is not None:
            out_TH += self.shared(x_TH).float()
        return out_TH.to(x_TH.dtype)

    def mixed(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """What each token's experts make of it, times their weights, added up: [T, H] float32."""
        return weighted_sum(self.computed(x_TH, experts_TK), weights_TK)

    def computed(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        """What each of a token's experts makes of it, [T, K, H]."""
        top_k = experts_TK.shape[1]
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=self.spec.experts).tolist()
        out = x_TH.new_empty(len(order), x_TH.shape[1])
        for expert, places in zip(self.experts, torch.split(order, counts), strict=True):
            if len(places):
                out[places] = few_alike(expert, x_TH[places // top_k])
        return out.view(len(x_TH), top_k, x_TH.shape[1])


def few_alike(module: Callable[[Tensor], Tensor], x_TH: Tensor) -> Tensor:
    """`module` of the rows, few of which have the bits they have among many.

    Libraries compute products of one to three rows in another order than those of more (MKL, oneDNN).
    """
    missing = FEWEST - len(x_TH)
    return module(x_TH) if missing <= 0 else module(F.pad(x_TH, (0, 0, 0, missing)))[: len(x_TH)]


def weighted_sum(parts_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] float32: the parts times their weights, added one after the other."""
    total = parts_TKH[:, 0].float() * weights_TK[:, :1]
    for k in range(1, weights_TK.shape[1]):
        total += parts_TKH[:, k].float() * weights_TK[:, k, None]
    return total
