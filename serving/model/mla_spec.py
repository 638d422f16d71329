"""What multi-head latent attention looks like, as data. Imports nothing heavy: routers and planners read it too."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def expand_from(self) -> int | None:
        """New tokens of a sequence from which keys and values are expanded for each head; None: never.

        Multiply-adds of one head, for n new tokens over C of context: n C (2 kv_rank + rope_dim) with queries absorbed
        into the latent's space; n C (nope_dim + rope_dim + value_dim) with C kv_rank (nope_dim + value_dim) to expand.
        """
        expanding, saved = self.kv_rank * (self.nope_dim + self.value_dim), 2 * self.kv_rank
        saved -= self.nope_dim + self.value_dim
        return None if saved <= 0 else -(-expanding // saved)
