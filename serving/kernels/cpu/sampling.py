"""Sampling tokens and taking log-probabilities, each as one call of the compiled kernels for all rows of a step.

It may not know sequences or sampling parameters: it is handed packed orders, and logits to carry them out on.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.kernels.cpu.extension import Kernels
from serving.kernels.cpu.structures import STRUCTURES

ORDER = Struct("5Q2d4f4i")
"""One row's order, `Order` of orders.h: seed, position, addresses of counts and seen (0 without penalties) and of the
bits of the tokens allowed (0 for all), top_p, min_p, temperature (0 is greedy), repetition, presence and frequency
penalties, top_k, first change, changes, bits."""


def sample(
    kernels: Kernels, logits: Tensor, orders: Sequence[bytes], ids: Sequence[int] = (), changes: Sequence[float] = ()
) -> list[int]:
    """A token for each row of `logits` [R, V] float32; -1 where they are no numbers, -2 where every token is masked.

    `changes[i]` is added to the logit of `ids[i]`, which must lie in the vocabulary, by the order that names place i.
    """
    logits = rows_of(logits)
    count, vocab = logits.shape
    assert len(orders) == count and len(ids) == len(changes), "an order for each row, and a change for each id"
    # Arrays and ctypes: numpy's and torch's constructors take longer than sampling a row.
    tokens = (ctypes.c_int64 * count)()
    arrays: tuple[array[Any], ...] = (array("B", b"".join(orders)), array("i", ids), array("f", changes))
    places = [one.buffer_info()[0] for one in arrays]
    call = STRUCTURES["Samples"](logits.data_ptr(), logits.stride(0), count, vocab, *places, ctypes.addressof(tokens))
    kernels.run("sample", call)
    return list(tokens)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of R rows' chosen tokens [R] and of their K best, `ids` and `values` [R, K], best first.

    Where `bad` [R], the row holds NaN or +inf, or nothing but -inf, and the rest has no meaning.
    """

    bad: NDArray[np.bool_]
    chosen: NDArray[np.float32]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]


def logprobs(kernels: Kernels, logits: Tensor, chosen: Sequence[int], k: int) -> Logprobs:
    """Of `logits` [R, V] float32 and the tokens `chosen` [R]; k is V at most. Equal logits are ranked by id."""
    logits = rows_of(logits)
    count, vocab = logits.shape
    assert len(chosen) == count and 0 <= k <= vocab, "one token a row, and no more of the best than there are tokens"
    tokens = np.array(chosen, dtype=np.int64)
    whole, of_chosen = np.empty(count), np.zeros(count, dtype=np.float32)
    ids, best = np.zeros((count, k), dtype=np.int32), np.zeros((count, k), dtype=np.float32)
    places = [array.ctypes.data for array in (tokens, whole, of_chosen, ids, best)]
    wanted = STRUCTURES["Logprobs"](logits.data_ptr(), logits.stride(0), count, vocab, k, *places)
    kernels.run("logprobs", wanted)
    ranked = np.argsort(-best, axis=-1, kind="stable")  # they come in order of id, and equals stay in it
    values = (np.take_along_axis(best, ranked, -1) - whole[:, None]).astype(np.float32)
    return Logprobs(np.isnan(whole), of_chosen, np.take_along_axis(ids, ranked, -1).astype(np.int64), values)


def rows_of(logits: Tensor) -> Tensor:
    """The same values where a row is read from one address on."""
    assert logits.dtype == torch.float32 and logits.is_cpu
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
