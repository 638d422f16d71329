"""`python -m tests.flow.chaos`: every fault in turn on a cluster of real processes, as a table.

The exit status is 1 where something that was promised did not hold; what it was is printed below the table.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.flow.chaos.cluster import ChaosCluster
from tests.flow.chaos.load import Client
from tests.flow.chaos.run import Result, run, undisturbed
from tests.flow.chaos.scenarios import SCENARIOS, Scenario
from tests.tiny import tiny_llama

HEAD = (
    *("fault", "requests", "failed", "exact", "longest s", "silence s", "replaced"),
    *("breakers opened", "red after s", "green after s", "idle after s"),
)


def row(result: Result) -> str:
    """One line of the table, in Markdown."""
    outcomes = result.outcomes
    name = result.scenario.name + (f": {result.resets} of them" if result.resets else "")
    cells = (
        *(name, len(outcomes), len(result.failed), sum(outcome.exact for outcome in outcomes)),
        max((outcome.seconds for outcome in outcomes), default=None),
        max((outcome.silence for outcome in outcomes), default=None),
        *(result.replacements, opened(result), result.red_after, result.green_after, result.idle_after),
    )
    return "| " + " | ".join(map(_cell, cells)) + " |"


def opened(result: Result) -> str:
    """The workers whose breakers opened; the ways between, where pairs were red beside that."""
    workers = sorted(result.watch.breakers)
    ways = sorted(" to ".join(pair) for pair in result.watch.red if not {*pair} & {*workers})
    return ", ".join([*workers, *ways]) or "none"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


async def chaos(cluster: ChaosCluster, model: Path, scenarios: Sequence[Scenario]) -> list[str]:
    """Run these, and print a line for each; what did not hold."""
    complaints = []
    async with Client(cluster.url) as client:
        texts = await undisturbed(model, client)
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
        for scenario in scenarios:
            result = await run(cluster, scenario, client, texts)
            print(row(result), flush=True)
            found = result.complaints() + result.false_alarms()
            complaints += [f"{scenario.name}: {complaint}" for complaint in found]
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flow.chaos", description="Every fault in turn, as a table.")
    parser.add_argument("words", nargs="*", help="run the scenarios whose names hold one of these words; default: all")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what the processes logged")
    given = parser.parse_args()
    chosen = [one for one in SCENARIOS if not given.words or any(word in one.name for word in given.words)]
    if not chosen:
        parser.error("no scenario has such a name; there are: " + ", ".join(one.name for one in SCENARIOS))
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny")
        with ChaosCluster(model) as cluster:
            try:
                complaints = asyncio.run(chaos(cluster, model, chosen))
            finally:
                if given.log is not None:
                    given.log.write_text(cluster.log())
    print("\n".join(["", *complaints]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
