"""What multi-head latent attention looks like, as data. Imports nothing heavy: routers and planners read it too."""

from __future__ import annotations

from dataclasses import dataclass

ABSORBED_COST = 1.2
"""Median of what `python -m bench.latent --only forms --heads 8` found for contexts of 64 to 4,096 tokens, float32 and
bfloat16, on an AMD EPYC (Zen 3, AVX2; 0.95 to 1.67): bench/results/2026-11-23-latent-attention.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token keeps one latent of `kv_rank` elements, from which each head's key and value are made, and one rotated key
    of `rope_dim` elements that all heads share. A head's query and key have `nope_dim` elements beside those.
    """

    kv_rank: int
    q_rank: int | None  # width that queries are compressed to; None: they are made from the hidden state directly
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float  # of the scores
    interleaved: bool = True  # checkpoints hold the two dimensions of a rope pair beside each other
    norm_eps: float = 1e-6  # of the norms over latents: the models' own code has it apart from `rms_norm_eps`

    def expands(self, new: int, context: int) -> bool:
        """True where a sequence's `new` tokens over `context`, themselves included, cost less with keys and values
        expanded for each head than with queries absorbed into the latent's space.

        Multiply-adds of one head: n C (2 kv_rank + rope_dim) absorbed, and n E to bring queries there and values back,
        E = kv_rank (nope_dim + value_dim); n C (nope_dim + rope_dim + value_dim) expanded, and C E to expand. One of
        the absorbed form takes ABSORBED_COST times as long as one of the expanded form, as measured.
        """
        expanding = self.kv_rank * (self.nope_dim + self.value_dim)
        absorbed = new * (context * (2 * self.kv_rank + self.rope_dim) + expanding)
        expanded = context * (new * (self.nope_dim + self.rope_dim + self.value_dim) + expanding)
        return absorbed * ABSORBED_COST >= expanded
