"""Rank and weight of tokens as whole numbers: how the kernels that draw read a row of logits.

It knows a part of a row, and neither what is kept of it nor what is drawn.
"""

from __future__ import annotations

import triton.language as tl

from serving.kernels.gpu.launch import kernel

LARGEST_VOCABULARY = 2**18  # weights of more tokens would have too few bits
ASKED = tl.constexpr(4)  # columns of what each row asks for: temperature, min-p, top-p and a number in [0, 1)


def weight_scale(vocab: int) -> float:
    """The weight of the best of so many tokens: all together weigh no more than 2^62, and each fits a float64."""
    return 2.0 ** min(52, 62 - (vocab - 1).bit_length())


@kernel
def ranked(logits_ptr, at, vocab, peak, asked_ptr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of tokens `at` [N]: are they of the vocabulary, key int32, exp(scaled logit) float64, and that as weight int64.

    A key is the bits of (peak - logit) / temperature: never negative, and the better token's is less. What is no number
    weighs nothing.
    """
    inside = at < vocab
    logits = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    temperature = tl.load(asked_ptr).to(tl.float32)
    scaled = tl.div_rn(logits - peak, tl.zeros_like(logits) + temperature)  # rounded as torch does
    shares = tl.where(scaled <= 0, tl.exp(tl.minimum(scaled, 0.0).to(tl.float64)), 0.0)
    key = tl.abs(scaled).to(tl.int32, bitcast=True)
    return inside, key, shares, (shares * SCALE + 0.5).to(tl.int64)
