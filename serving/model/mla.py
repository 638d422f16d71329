"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): KV is one latent a token, from which heads make theirs.

A sequence with few new tokens attends in the latent's space, its queries absorbed into it; one with many expands keys
and values from the latents. Both give the same result but for rounding; `MlaSpec.expands` says which is less work.

Shapes: T new tokens in the step, H heads, L elements of the latent, R of the rotated key, N of a key beside it, V of a
value, C tokens of context.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.model.mla_spec import MlaSpec
from serving.model.norms import RmsNorm


class KvExpansion(nn.Module):
    """Makes keys and values of latents. Rows of `weight` are, for each head, N of its key, then V of its value.

    It is no Linear: absorbed, it is a product with queries and with attended latents, so it stays as exact as the
    model's own type where linear layers become INT8. Products are in float32: `hold_float32` for the weight as well.
    """

    def __init__(self, heads: int, spec: MlaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(heads * (spec.nope_dim + spec.value_dim), spec.kv_rank))

    def per_head(self) -> tuple[Tensor, Tensor]:
        """What makes keys [H, N, L] and values [H, V, L], float32."""
        spec = self.spec
        weight = self.weight.float().view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        return weight[:, : spec.nope_dim], weight[:, spec.nope_dim :]

    def expanded(self, c_CL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [C, H, N] and values [C, H, V], float32."""
        spec = self.spec
        both = F.linear(c_CL.float(), self.weight.float()).view(len(c_CL), -1, spec.nope_dim + spec.value_dim)
        return both[..., : spec.nope_dim], both[..., spec.nope_dim :]


def hold_float32(model: nn.Module) -> None:
    """Hold what expands latents in float32, rounded as it is: widened at each step it would be read and written anew.

    That is 4 bytes in place of 2 for each of H (N + V) L elements of a layer: for DeepSeek-V3 33.5 MB more of each of
    61 layers, 2.05 GB in all.
    """
    for module in model.modules():
        if isinstance(module, KvExpansion):
            module.weight = nn.Parameter(module.weight.float(), requires_grad=False)


class MlaAttention(nn.Module):
    """Attention over latents. Rows of `qkv_a` are those of the queries, compressed or not, then L, then R."""

    def __init__(self, hidden: int, heads: int, spec: MlaSpec, *, bias: bool = False) -> None:
        super().__init__()
        self.spec = spec
        query = heads * (spec.nope_dim + spec.rope_dim)
        self.qkv_a = nn.Linear(hidden, (spec.q_rank or query) + spec.kv_rank + spec.rope_dim, bias=bias)
        self.q_a_norm = RmsNorm(spec.q_rank, spec.norm_eps) if spec.q_rank else None
        self.q_b = nn.Linear(spec.q_rank, query, bias=False) if spec.q_rank else None
        self.kv_a_norm = RmsNorm(spec.kv_rank, spec.norm_eps)
        self.kv_b = KvExpansion(heads, spec)
        self.o = nn.Linear(heads * spec.value_dim, hidden, bias=bias)

    def forward(
        self, x_TH: Tensor, rotation: tuple[Tensor, Tensor] | None, batch: RaggedBatch, planes: tuple[Tensor, ...]
    ) -> Tensor:
        assert rotation is not None
        spec, given = self.spec, self.qkv_a(x_TH)
        q, c, r = given.split((given.shape[1] - spec.kv_rank - spec.rope_dim, spec.kv_rank, spec.rope_dim), dim=1)
        if self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(q))
        nope, turning = q.unflatten(1, (-1, spec.nope_dim + spec.rope_dim)).split((spec.nope_dim, spec.rope_dim), -1)
        turned, r_T1R = kernels.rope(turning, r[:, None], *rotation)
        kernels.write_latent(self.kv_a_norm(c), r_T1R[:, 0], planes, batch.slots)
        return self.o(self._attended(nope, turned, batch, planes).to(x_TH.dtype).flatten(1))  # type: ignore[no-any-return]

    def _attended(self, nope: Tensor, turned: Tensor, batch: RaggedBatch, planes: tuple[Tensor, ...]) -> Tensor:
        """[T, H, V] float32: each sequence in the form that is less work for it."""
        lens = batch.query_lens
        many = [
            one for one, size in enumerate(zip(lens, batch.context_lens_list, strict=True)) if self.spec.expands(*size)
        ]
        if not many:
            return self.absorbed(nope, turned, batch, planes)
        if len(many) == len(lens):
            return self.expanded(nope, turned, batch, planes)
        out = nope.new_empty(*nope.shape[:2], self.spec.value_dim, dtype=torch.float32)
        for form, chosen in (
            (self.expanded, many),
            (self.absorbed, [one for one in range(len(lens)) if one not in many]),
        ):
            part, rows = kernels.part_of(batch, chosen)
            out[rows] = form(nope[rows], turned[rows], part, planes)
        return out

    def absorbed(self, nope: Tensor, turned: Tensor, batch: RaggedBatch, planes: tuple[Tensor, ...]) -> Tensor:
        keys_HNL, values_HVL = self.kv_b.per_head()
        latent_THL = torch.einsum("thn,hnl->thl", nope.float(), keys_HNL)
        q = torch.cat((latent_THL, turned.float()), -1)
        attended_THL = kernels.absorbed_attention(q, planes, batch, self.spec.scale)
        return torch.einsum("thl,hvl->thv", attended_THL, values_HVL)

    def expanded(self, nope: Tensor, turned: Tensor, batch: RaggedBatch, planes: tuple[Tensor, ...]) -> Tensor:
        q, spec = torch.cat((nope, turned), -1).float(), self.spec
        return kernels.expanded_attention(q, planes, batch, spec.scale, self.kv_b.expanded, spec.value_dim)
