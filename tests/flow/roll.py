"""A longer run than the tests hold: two routers over the same workers, a router killed and one stopped, every worker
replaced round after round under streams that outlast it all. Prints what came of it as a table.

    python -m tests.flow.roll --rounds 3 --streams 6
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from tests.fakes.stopping import harm
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import wait_until
from tests.flow.services import Services
from tests.flow.test_two_routers import LENGTH, Stream, begun, flags_of, gone_further
from tests.tiny import tiny_llama

SHORT_TOKENS = 10


def say(what: str, found: object) -> None:
    print(f"{what:72} {found}", flush=True)


async def seconds_until(condition: Callable[[], bool], most: float, what: str) -> str:
    began = time.monotonic()
    await asyncio.to_thread(wait_until, condition, most, what)
    return f"{time.monotonic() - began:.2f} s"


class Roll:
    """The run over these services. Greedy texts are compared with those of `transformers`."""

    def __init__(self, services: Services, client: httpx.AsyncClient, model: Path):
        self.services = services
        self.client = client
        self.model = model
        self.exact = self.wrong = 0

    def check(self, streams: Sequence[Stream]) -> None:
        right = sum(is_greedy_tiny(self.model, stream.prompt, stream.tokens) for stream in streams)
        self.exact += right
        self.wrong += len(streams) - right

    async def lose_a_router(self, how: signal.Signals) -> None:
        """Three streams at each router, then the signal to the first: its leases are freed, the other's go on."""
        first, second = self.services.routers
        asked = prompts(6, shortest=20, longest=100, seed=int(how))
        lost = [Stream(self.client, first, prompt, LENGTH // 2) for prompt in asked[:3]]
        kept = [Stream(self.client, second, prompt, LENGTH // 2) for prompt in asked[3:]]
        await begun([*lost, *kept], 10)
        moved = second.metric("replacements_total")
        harm(first.process.pid, how)
        held = self.services.held
        say(
            f"{how.name} of a router: its leases are free after",
            await seconds_until(lambda: sum(held().values()) <= 3, 60.0, "its leases are free"),
        )
        if how is signal.SIGKILL:
            first.process.wait()
            first.start()
        else:
            first.process.send_signal(signal.SIGCONT)
        say(
            f"{how.name} of a router: it serves again after it was started again, or went on,",
            await seconds_until(
                lambda: (
                    self.services.living(first) == set(self.services.workers)
                    if first.get("/health")[0] == 200
                    else False
                ),
                60.0,
                "the router is back",
            ),
        )
        await gone_further(kept, 10)
        say("  streams of the other router: moved", f"{second.metric('replacements_total') - moved:g}")
        if how is signal.SIGSTOP:  # its requests go on, too
            await gone_further(lost, 10)
        for stream in [*kept, *lost]:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in [*kept, *lost]), return_exceptions=True)
        self.check([*kept, *lost])
        await self.idle()

    async def roll(self, rounds: int, count: int) -> None:
        """Every worker, round after round, under `count` streams and short requests one after the other."""
        routers = self.services.routers
        asked = prompts(count + 1, shortest=20, longest=100, seed=52)
        streams = [Stream(self.client, routers[n % 2], prompt, LENGTH - 200) for n, prompt in enumerate(asked[:count])]
        short: list[Stream] = []
        await begun(streams, 10)
        moved = sum(router.metric("replacements_total") for router in routers)
        began, pause, seen = time.monotonic(), 0.0, [(0, time.monotonic())] * count
        for number in range(rounds):
            for name in self.services.workers:
                at = time.monotonic()
                rolling = asyncio.create_task(asyncio.to_thread(self.services.replace, name, 30.0))
                while not rolling.done():
                    short += [Stream(self.client, router, asked[count], SHORT_TOKENS) for router in routers]
                    answers = asyncio.gather(*(stream.whole() for stream in short[-2:]))
                    while not (answers.done() and (rolling.done() or len(short) % 2 == 0)):
                        await asyncio.sleep(0.02)
                        for n, stream in enumerate(streams):
                            if len(stream.tokens) > seen[n][0]:
                                pause = max(pause, time.monotonic() - seen[n][1])
                                seen[n] = len(stream.tokens), time.monotonic()
                    await answers
                await rolling
                say(f"round {number + 1}: {name} left and the next one serves, after", f"{time.monotonic() - at:.1f} s")
        far = [len(stream.tokens) for stream in streams]
        await gone_further(streams, 10)
        for stream in streams:
            await stream.leave()
        self.check([*streams, *short])
        say("the roll took", f"{time.monotonic() - began:.1f} s")
        say("streams that lasted longer", f"{count}, none ended; {min(far)} to {max(far)} tokens each")
        say(
            "moves of requests from a worker that left",
            f"{sum(router.metric('replacements_total') for router in routers) - moved:g}",
        )
        say("the longest pause in a stream", f"{pause:.2f} s")
        say("short requests meanwhile, all served", len(short))
        await self.idle()

    async def idle(self) -> None:
        for router in self.services.routers:
            await asyncio.to_thread(router.wait_idle)


async def main(rounds: int, streams: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "tiny", layers=16, max_position=LENGTH)
        with Services(model, 2, ("prefill", "decode", "mixed"), *flags_of(blocks=4096)) as services:
            async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=200)) as client:
                run = Roll(services, client, model)
                await run.roll(rounds, streams)
                await run.lose_a_router(signal.SIGKILL)
                await run.lose_a_router(signal.SIGSTOP)
                failed = sum(router.metric("request_failure_total") for router in services.routers)
                say("requests that failed at a router", f"{failed:g}")
                say("texts compared: exact, and not", f"{run.exact}, {run.wrong}")
                say("audit of every service at the end", "nothing held, nothing leaked")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every worker is replaced (default: 3)")
    parser.add_argument("--streams", type=int, default=6, help="that last longer than that (default: 6)")
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.streams))
    sys.exit(0)
