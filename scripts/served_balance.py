"""Experts that move between the ranks of a worker that serves: what its steps take, and whether texts stay the same.

Run `python -m scripts.served_balance`. Clients, in a process of their own, ask through a router without pause; every
few seconds their prompts change to another topic, whose rows prefer other experts. So steps during which weights are
copied, and steps without, take turns in one run. Texts are compared with those of one process that holds all experts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import uvloop

from bench.free_pages import reports, told_since
from scripts.served_clients import served_apart
from scripts.served_group import ModelSize, Prompt, Step, Text, prompts, served, write_model
from scripts.slow_spells import SlowSpells
from serving.expert_parallel.copies import CHUNK
from serving.expert_parallel.replanning import BalancePolicy
from serving.loader.loading import load
from serving.rank_group.leader import SpreadModel, load_spread
from serving.rank_group.messages import Balancing

TOPICS = 6
DEADLINE = 30.0
INTERVAL = 20  # steps between rounds
FIRST = 20  # steps in which memory is first touched
POLICY = BalancePolicy(above=1.05, target=1.02, least_gain=0.01, fewest_rows=64, kept=0.0)


def asked_for(clients: int) -> list[list[Prompt]]:
    return [prompts(topic, clients) for topic in range(TOPICS)]


async def alone(path: Path, clients: int) -> dict[Prompt, tuple[int, ...]]:
    """Each prompt's text by one process."""
    async with served(load(path, "float32"), clients) as one:
        return {text.prompt: text.tokens for topic in asked_for(clients) for text in await one.ask(topic)}


async def under_load(spread: SpreadModel, clients: int, seconds: float) -> tuple[str, list[Text]]:
    """Serve for so long; what the steps were, and the texts."""
    with SlowSpells() as slow:
        async with served_apart(spread, clients, asked_for(clients), seconds) as (steps, asked):
            slow.since, before = time.monotonic(), reports()
            texts = await asked
            host = told_since(before)
    spells = f"slow spells: {len(slow.found)} looks, {1e3 * slow.seconds:.0f} ms on all cores"
    return "\n".join([*step_table(steps.found, slow), spells, host, *budget_lines(steps.found, spread)]), texts


def step_table(steps: Sequence[Step], slow: SlowSpells) -> Iterator[str]:
    """Whole steps of all clients without prompts, those during which weights were copied or switched apart.

    The longest ones also without those in which the machine was slow for whoever computed.
    """
    most = max(step.sequences for step in steps)
    pairs = [(one, two) for one, two in pairwise(steps[FIRST:]) if two.sequences == most and not two.prompt_tokens]
    if not pairs:
        yield f"steps: {len(steps)}, none of which could be counted: serve for longer"
        return
    kinds: dict[str, list[Step]] = {"experts are switched": [], "weights are copied": [], "nothing moves": []}
    for one, two in pairs:
        copied = "weights are copied" if two.moved_bytes > one.moved_bytes else "nothing moves"
        kinds["experts are switched" if two.placements > one.placements else copied].append(two)
    median = statistics.median(two.seconds for _, two in pairs)
    yield f"steps: {len(steps)}; {len(pairs)} of them have {most} sequences and no prompt, median {1e3 * median:.1f} ms"
    cells = ["steps in which", "number", "median ms", "p99", "longest", "longest / median of all"]
    cells += ["of twice the median", "with a slow spell", "longest / median without one", "of twice without one"]
    cells += ["CPU ms, median", "p99", "longest"]
    cells += ["without waits for a core: median", "p99", "longest", "longest / median"]
    yield "| " + " | ".join(cells) + " |\n" + "| --- " * len(cells) + "|"
    for name, chosen in kinds.items():
        if len(chosen) > 1:
            took, cpu = ([getattr(step, one) for step in chosen] for one in ("seconds", "cpu_seconds"))
            cells = [name, f"{len(chosen)}", *figures(took), f"{max(took) / median:.2f}"]
            outside = [step.seconds for step in chosen if not slow.during(step.began, step.seconds)]
            beyond = [f"{sum(one > 2 * median for one in each)}" for each in (took, outside)]
            cells += [beyond[0], f"{len(took) - len(outside)}"]
            cells += [f"{max(outside) / median:.2f}" if outside else "-", beyond[1], *figures(cpu)]
            running = [step.seconds - min(step.core_seconds, step.seconds) for step in chosen]
            cells += [*figures(running), f"{max(running) / statistics.median(running):.2f}"]
            yield "| " + " | ".join(cells) + " |"


def figures(seconds: Sequence[float]) -> list[str]:
    """Milliseconds: the median, the 99th percentile, the most."""
    tail = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return [f"{1e3 * number:.1f}" for number in (statistics.median(seconds), tail, max(seconds))]


def budget_lines(steps: Sequence[Step], spread: SpreadModel) -> Iterator[str]:
    ranks, balancing = spread.ranks, spread.ranks.balancing
    if balancing is None:
        return
    allowed = ranks.configured * (balancing.bytes_per_second + min(CHUNK, balancing.bytes_per_second))
    most, first = 0, 0
    for step in steps:
        while steps[first].began < step.began - 1.0:
            first += 1
        most = max(most, step.moved_bytes - steps[first].moved_bytes)
    share = f"{most / 1e6:.2f} MB within a second, {100 * most / allowed:.0f} % of what the budget allows"
    yield f"moved: {ranks.totals.moved_experts} experts, {ranks.totals.moved_bytes / 1e6:.1f} MB; at most {share}"
    yield f"placed anew {steps[-1].placements - 1} times; imbalance in the last round {ranks.imbalance:.2f}"
    yield f"switches and what is told of them took {1e3 * ranks.switch_seconds:.2f} ms of a step at most (the leader's)"


def loads() -> str:
    return ", ".join(f"{one:.0f}" for one in os.getloadavg())


def main() -> None:
    parser, small = argparse.ArgumentParser(description=__doc__), ModelSize()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--redundant", type=int, default=4, help="slots beyond one for each of 16 experts")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of weights a second that a rank may copy")
    parser.add_argument("--layers", type=int, default=small.layers)
    parser.add_argument("--hidden", type=int, default=small.hidden, help="1024 and a width of 1024: longer steps")
    parser.add_argument("--width", type=int, default=small.width, help="of an expert")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--still", action="store_true", help="no expert moves: what the machine does by itself")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = ModelSize(layers=args.layers, hidden=args.hidden, width=args.width)
        path = write_model(Path(folder), size)
        shape = f"{size.layers} layers, hidden {size.hidden}, {size.experts} experts of {size.width}"
        print(f"{args.ranks} ranks, {args.clients} clients; {shape}; load averages {loads()}", flush=True)
        balancing = (
            None if args.still else Balancing(policy=POLICY, interval=INTERVAL, bytes_per_second=args.megabytes * 1e6)
        )
        torch.set_num_threads(args.ranks)
        spread = load_spread(
            path, "float32", None, args.ranks, DEADLINE, redundant=args.redundant, balancing=balancing
        )  # fmt: skip
        try:
            told, texts = uvloop.run(under_load(spread, args.clients, args.seconds))
        finally:
            spread.ranks.close()
        print(told, flush=True)
        del spread  # and its weights
        torch.set_num_threads(1)
        wanted = uvloop.run(alone(path, args.clients))  # not before: what it frees would disturb what is measured
        wrong = sum(text.tokens != wanted[text.prompt] for text in texts)
        print(f"texts: {len(texts)} whole ones, of which {wrong} differ from those of one process")
        print(f"load averages at the end {loads()}")


if __name__ == "__main__":
    main()
