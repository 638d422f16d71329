"""Which rank computes which sequences of a step. Pure.

Any rank may compute any sequence, since all reach all KV. Rows of prompts weigh most; among equals, longer contexts.
"""

from __future__ import annotations

from collections.abc import Sequence


def divided(query_lens: Sequence[int], context_lens: Sequence[int], ranks: int) -> list[list[int]]:
    """The sequences of each rank, in ascending order: the largest first, each to the rank with least so far.

    Rank 0 has one wherever there is any. Counts are tokens.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0)] * ranks
    order = sorted(range(len(query_lens)), key=lambda one: (-query_lens[one], -context_lens[one], one))
    for one in order:
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        rows, context = loads[rank]
        loads[rank] = rows + query_lens[one], context + context_lens[one]
        found[rank].append(one)
    return [sorted(part) for part in found]
