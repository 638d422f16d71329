"""Block hit rates of the KV pool's eviction policies on multi-turn chats.

    python -m bench.eviction [--lengths FILE]

The policies are the very ones that serve, on a shelf of the pool; what is asked for is drawn by bench.chats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.chats import ChatTraceOptions, Turn, chat_turns
from bench.lengths import read_pairs, sharegpt_pairs
from bench.report import aligned
from kvcache.pool.eviction import DEFAULT_POLICY, POLICIES
from kvcache.pool.shelf import Quotas, Shelf

SHARES = (0.01, 0.03, 0.1, 0.3)  # of all the blocks there ever are


def footprint(turns: Sequence[Turn]) -> int:
    """Different blocks of a trace."""
    return len({key for turn in turns for key in turn.context})


def hit_rate(turns: Sequence[Turn], policy: str, capacity: int, *, last_first: bool = True) -> float:
    """The share of the prompts' blocks that a pool of `capacity` blocks has, each with all that come before it.

    As in the pool, what a turn finds is used and what it does not find is stored, the last block of the chain first.
    """
    shelf = Shelf(capacity, policy, Quotas())
    asked = found = 0
    for turn in turns:
        hits = next((index for index, key in enumerate(turn.prompt) if key not in shelf), len(turn.prompt))
        asked += len(turn.prompt)
        found += hits
        step = -1 if last_first else 1
        for key in turn.prompt[:hits][::step]:
            shelf.touch(key)
        fresh = [key for key in turn.context[hits:] if key not in shelf]
        for key in turn.context[hits:][::step]:
            shelf.touch(key)
        for key in fresh[::step]:
            shelf.admit(key, "", 1, stored_at=0.0, now=0.0)
    return found / asked


def table(turns: Sequence[Turn], shares: Sequence[float]) -> str:
    """One line a policy, one column a capacity; last what a pool without limits would find."""
    blocks = footprint(turns)
    cells = [["hit rate at", *(f"{share:.0%}" for share in shares), "all"]]
    ceiling = hit_rate(turns, "lru", blocks)
    variants = [("lru, first block first", "lru", False), *((name, name, True) for name in POLICIES)]
    for name, policy, last_first in variants:
        rates = [hit_rate(turns, policy, max(1, round(share * blocks)), last_first=last_first) for share in shares]
        label = f"{name} (default)" if policy == DEFAULT_POLICY and last_first else name
        cells.append([label, *(f"{rate:.1%}" for rate in (*rates, ceiling))])
    return aligned(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description="Hit rates of eviction policies.")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="JSON list of [prompt tokens, output tokens] to draw from (default: a table fitted to ShareGPT)",
    )
    parser.add_argument(
        "--conversations", type=int, default=ChatTraceOptions().conversations, help="(default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    given = parser.parse_args(arguments)
    pairs = read_pairs(given.lengths) if given.lengths is not None else sharegpt_pairs(4096, given.seed)
    turns = chat_turns(pairs, ChatTraceOptions(conversations=given.conversations), given.seed)
    print(f"{len(turns)} turns of {given.conversations} conversations, {footprint(turns)} different blocks\n")
    print(table(turns, SHARES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
