"""Ranks of a worker that serves are killed and stopped in mid-decode, again and again: what clients notice.

Run `python -m scripts.served_losses --times 100`. Clients ask through a router without pause. Each time one of the
ranks but the leader is harmed at no particular moment of a step; the next harm comes when it is in the group again.
Texts are compared with those of one process. Tables go to stdout; each loss, as it has been got over, to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scripts.served_balance import loads
from scripts.served_group import ModelSize, Prompt, Served, prompts, served, write_model
from serving.loader.loading import load
from serving.rank_group import restarts
from serving.rank_group.leader import SpreadModel, load_spread

CLIENTS = 6
LOOK = 0.002  # seconds between looks at what the group has noticed
MOST_SECONDS = 180.0  # until a rank is back
TIMES = {  # of a loss, and what they are called
    "noticed": "noticed",
    "stalled": "stalled",
    "client": "a client's wait",
    "back": "back after",
    "rejoined": "rejoin stalls",
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Loss:
    """One of them, in seconds."""

    noticed: float  # from the signal
    stalled: float  # from the beginning of the dropped step until the ranks that are left could compute
    client: float  # the longest that a client has waited for a token meanwhile
    back: float  # from the signal until the rank computed again
    rejoined: float  # that the others stood still for it
    repeated: int  # steps


async def lose(group: Served, spread: SpreadModel, victim: int, how: signal.Signals) -> Loss:
    """Raises TimeoutError where nobody notices, or the rank does not come back."""
    ranks, counts = spread.ranks, replace(spread.ranks.counts)
    pid = next(other.process.pid for other in ranks.others if other.rank == victim)
    harmed = time.monotonic()
    os.kill(pid, how)
    async with asyncio.timeout(MOST_SECONDS):
        await until(lambda: ranks.counts.stalled_seconds > counts.stalled_seconds and ranks.size < ranks.configured)
        between = replace(ranks.counts)
        await until(lambda: ranks.counts.admitted > counts.admitted and ranks.size == ranks.configured)
    back = time.monotonic()
    await until(lambda: min(times[-1] for times in group.heard) > back)  # every client has had a token since
    return Loss(
        noticed=between.noticed - harmed,
        stalled=between.stalled_seconds - counts.stalled_seconds,
        client=max(gap_at(times, harmed) for times in group.heard),
        back=back - harmed,
        rejoined=ranks.counts.stalled_seconds - between.stalled_seconds,
        repeated=ranks.counts.repeated_steps - counts.repeated_steps,
    )


def gap_at(times: Sequence[float], when: float) -> float:
    """Seconds between the tokens before and after, or those around the next token where one had just come."""
    after = next(number for number, time_ in enumerate(times) if time_ > when)
    return max(two - one for one, two in itertools.pairwise(times[after - 1 : after + 3]))


def progress(found: Sequence[Loss], times: int, victim: int, seconds: float) -> str:
    """A line on the last of them, `seconds` after the first harm began."""
    last, left = found[-1], seconds / len(found) * (times - len(found))
    took = ", ".join(f"{name} {1e3 * getattr(last, field):,.0f}" for field, name in TIMES.items())
    return f"{len(found)} of {times}: rank {victim}, ms: {took}; {seconds:.0f} s so far, about {left:.0f} s to go"


def opened() -> Counter[str]:
    """What this process has open, by kind, its threads, tasks and maps of shared memory, and what lies in /dev/shm.

    But for semaphores, which nothing here uses.
    """
    found: Counter[str] = Counter(str(path) for path in SHARED.iterdir() if not path.name.startswith("sem."))
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    found.update(f"task {task.get_coro().__qualname__}" for task in asyncio.all_tasks())  # type: ignore[union-attr]
    found.update(line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line)
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found[os.readlink(entry).partition(":")[0].partition(" ")[0]] += 1  # noqa: PTH115 - a pipe has no path
    return found


async def until(true: Callable[[], bool]) -> None:
    while True:
        if true():
            return
        await asyncio.sleep(LOOK)


async def losses(
    spread: SpreadModel, how: signal.Signals, times: int, wanted: dict[Prompt, tuple[int, ...]]
) -> list[str]:
    """A row of the table."""
    chance, found = random.Random(1), list[Loss]()
    async with served(spread, CLIENTS) as group:
        await group.ask(wanted)
        group.start(prompts(0, CLIENTS))
        await until(lambda: all(group.heard))
        before, began = opened(), time.monotonic()
        for number in range(times):
            victim = 1 + number % (spread.ranks.configured - 1)
            found.append(await lose(group, spread, victim, how))
            print(progress(found, times, victim, time.monotonic() - began), file=sys.stderr, flush=True)
            await asyncio.sleep(chance.uniform(0.05, 0.3))
        more = ", ".join(f"{name} +{count}" for name, count in (opened() - before).items()) or "none"
        await group.stop()
        wrong = sum(text.tokens != wanted[text.prompt] for text in group.texts)
    return [
        f"{len(found)}",
        *(f"{1e3 * statistics.median(seconds):,.0f} / {1e3 * max(seconds):,.0f}" for seconds in columns(found)),
        f"{sum(one.repeated for one in found)}",
        f"{spread.ranks.counts.loaded_experts}",
        f"{wrong} of {len(group.texts)}",
        more,
    ]


def columns(found: Sequence[Loss]) -> list[list[float]]:
    return [[getattr(one, name) for one in found] for name in TIMES]


HEADER = (
    "ranks", "signal", "copies", "times", *(f"{name} ms" for name in TIMES.values()),
    "steps repeated", "experts loaded", "texts that differ", "left open: more",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--signals", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--redundant", type=int, nargs="+", default=[16, 0], help="copies, of 16 experts a layer")
    parser.add_argument("--rank-timeout", type=float, default=1.0, help="seconds until a rank that is stopped is late")
    args = parser.parse_args()
    restarts.LASTING_SECONDS = 0.0  # a rank that we end is started again however short it has lasted
    logging.disable(logging.ERROR)
    print(f"times are median / most; --rank-timeout {args.rank_timeout:g} s; load averages {loads()}")
    for cells in (HEADER, ["---"] * len(HEADER)):
        print("| " + " | ".join(cells) + " |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), ModelSize(layers=3, width=256))
        torch.set_num_threads(1)
        wanted = asyncio.run(alone(path))
        for name, redundant in itertools.product(args.signals, args.redundant):
            torch.set_num_threads(args.ranks)
            spread = load_spread(path, "float32", None, args.ranks, args.rank_timeout, redundant=redundant)
            try:
                row = asyncio.run(losses(spread, SIGNALS[name], args.times, wanted))
            finally:
                spread.ranks.close()
            print("| " + " | ".join([f"{args.ranks}", f"SIG{name.upper()}", f"{redundant}", *row]) + " |", flush=True)
    print(f"load averages at the end {loads()}")


async def alone(path: Path) -> dict[Prompt, tuple[int, ...]]:
    async with served(load(path, "float32"), CLIENTS) as one:
        return {text.prompt: text.tokens for text in await one.ask(prompts(0, CLIENTS))}


if __name__ == "__main__":
    main()
