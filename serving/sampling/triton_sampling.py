"""Draws the tokens of rows of logits by the Triton kernels, in place of torch's sorts; importing this needs triton.

It packs each row's parameters into columns. How a token is drawn it may not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serving.batch.device_copy import all_on_device
from serving.kernels.gpu import drawing
from serving.kernels.gpu.radix_search import DrawColumns
from serving.messages import SamplingParams
from serving.sampling import torch_sampling
from serving.sampling.randomness import uniforms
from serving.sampling.sampler import SampleRow


def draw(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """What `torch_sampling.draw` gives; by that itself for vocabularies larger than the kernels'."""
    vocab = logits.shape[1]
    if not drawing.supported(vocab):
        return torch_sampling.draw(logits, peaks, rows)
    params = [row.params for row in rows]
    numbers = uniforms([p.seed for p in params], [row.position for row in rows])
    asked = np.array([(p.temperature, p.min_p, p.top_p, n) for p, n in zip(params, numbers, strict=True)])
    top_k = np.array([p.top_k if 0 < p.top_k < vocab else vocab for p in params], dtype=np.int64)
    columns = all_on_device([asked, top_k], logits.device)
    bounded = bool((top_k < vocab).any()) or any(p.min_p > 0.0 for p in params)
    return drawing.draw(
        logits, peaks, DrawColumns(columns[0], columns[1], bounded=bounded, nucleus=any(p.top_p < 1.0 for p in params))
    )


def warm_up(vocab: int, device: torch.device) -> None:
    """Compile every kernel of a draw from so many tokens now, so that no request waits for it."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=2)
    for one in (params, SamplingParams(max_tokens=1, temperature=1.0)):
        logits = torch.zeros(1, vocab, device=device)
        draw(logits, logits[:, 0], [SampleRow(one, position=0, output_tokens=(), prompt_tokens=())])
