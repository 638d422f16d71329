"""What INT8 rows on the way to experts cost in quality, over two ranks: perplexity and the likeliest tokens that agree.

    python -m bench.int8_dispatch FLOAT INT8 [--tokens N]

FLOAT is a mixture of experts (`millrace upcycle`), INT8 the same quantized (`millrace quantize`). The text is that of
`bench.quality`. Two processes hold half of the experts each and exchange rows through shared memory; each reads every
second window. Rows travel as int8 to float experts in no server: here alone, to show what that would cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.quality import Scores, compare, score, table, text
from bench.rank_processes import run_ranks
from serving.expert_parallel.exchange import ExchangeTraffic, Rows
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, hold_experts
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.kernels.int8 import quantize_rows
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.expert_balance import Layout, placed
from serving.text.tokenizer import load_tokenizer

RANKS = 2
DEADLINE = 600.0  # seconds: a rank may have to load its model
CASES = ("float experts, float rows", "float experts, INT8 rows", "INT8 experts, float rows", "INT8 experts, INT8 rows")
Answer = tuple[list[NDArray[Any]], list[NDArray[Any]], ExchangeTraffic]


class RoundedExchange(SharedMemoryExchange):
    """An exchange whose rows are worth what INT8 makes of them."""

    def begin_dispatch(self, rows: Rows, physical: Tensor) -> None:
        values, scale = quantize_rows(rows.values)
        rounded = (values * scale[:, None]).to(rows.values.dtype)
        super().begin_dispatch(Rows(rounded), physical)


def run_rank(
    rank: int, port: int, case: str, path: Path, windows: Sequence[Sequence[int]], answers: Connection
) -> None:
    """Sends the scores of this rank's windows, and what it has sent."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    whole = load(path, "bfloat16").spec
    assert whole.moe is not None
    layout = Layout(ranks=RANKS, slots=whole.moe.experts // RANKS)
    spread = [placed([1.0] * whole.moe.experts, layout)] * sum(whole.moe.sparse)
    model = load(path, "bfloat16", layout=lambda built: hold_experts(built, spread, rank)).model
    shape = exchange_shape(model, spread[0], max(map(len, windows)))
    if case.endswith("float rows"):
        shape = replace(shape, wire=shape.back)
    kind = RoundedExchange if case == CASES[1] else SharedMemoryExchange
    exchange = kind.join(shape, rank, PrefixStore(case, store), deadline=DEADLINE, meeting=DEADLINE)
    apply_expert_parallel(model, spread, exchange)
    found = [scores_of(model, window) for window in windows[rank::RANKS]]
    scores = ([one.logprobs.numpy() for one in found], [one.likeliest.numpy() for one in found])
    answers.send((*scores, exchange.traffic))  # as arrays: tensors would be files that end with this process
    exchange.close()


def scores_of(model: Decoder, window: Sequence[int]) -> Scores:
    return score(model, [window], "bfloat16")


def scored(case: str, path: Path, windows: Sequence[Sequence[int]]) -> tuple[Scores, ExchangeTraffic]:
    """The scores of all windows, in order of rank and window, and what the ranks have sent together."""
    answers: list[Answer] = run_ranks(RANKS, run_rank, case, path, windows, preload=False)
    logprobs = torch.cat([torch.from_numpy(one) for answer in answers for one in answer[0]])
    likeliest = torch.cat([torch.from_numpy(one) for answer in answers for one in answer[1]])
    return Scores(logprobs=logprobs, likeliest=likeliest), answers[0][2] + answers[1][2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("float", type=Path, help="a folder with float experts")
    parser.add_argument("int8", type=Path, help="the same quantized")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text to read (default: 4096)")
    parser.add_argument("--window", type=int, default=512, help="tokens read at a time (default: 512)")
    given = parser.parse_args()
    tokens = load_tokenizer(given.float).encode(text(), add_special_tokens=False)[: given.tokens]
    windows = [tokens[at : at + given.window] for at in range(0, len(tokens) - given.window + 1, given.window)]
    if len(windows) < RANKS:
        raise ValueError(f"{len(windows)} windows are too few for {RANKS} ranks")
    windows = windows[: len(windows) // RANKS * RANKS]  # a rank takes part in every step of the other
    found, rows = {}, []
    for case in CASES:
        found[case], sent = scored(case, given.float if case.startswith("float") else given.int8, windows)
        rows.append(compare(case, found[CASES[0]], found[case], 0.0))
        print(f"{case}: {sent.dispatch_bytes / sent.rows:.0f} bytes a row, {sent.rows} rows", flush=True)
    same = torch.equal(found[CASES[2]].logprobs, found[CASES[3]].logprobs)
    print(table("docstrings", rows))
    print(
        f"INT8 experts: the log-probabilities of float rows and INT8 rows are {'the same' if same else 'not the same'}"
    )


if __name__ == "__main__":
    main()
