"""Rolls of real processes under constant streaming load: of the same build, to a new KV protocol, to a new model.

Prints what came of them as a table.

    python -m tests.flow.generation_roll --streams 6
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch

from serving.messages import KV_PROTOCOL
from tests.flow.ports import free_port
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import START_SECONDS, samples, wait_until
from tests.flow.services import REPOSITORY, RouterService, WorkerService
from tests.flow.test_two_routers import Stream, begun, gone_further
from tests.tiny import tiny_llama

LENGTH = 8192
SHORT = 24  # tokens of the load's texts
LASTING = 200  # of texts that run while a model is replaced, and have to end by themselves
FLAGS = ("--heartbeat-interval", "0.2", "--served-model-name", "tiny")
COMPUTING = ("--dtype", "float32", "--kernels", "torch", "--threads", "1", "--max-num-seqs", "16")
COMPUTING += ("--num-kv-blocks", "2048", "--num-speculative-tokens", "0")


def say(what: str, found: object) -> None:
    print(f"{what:64} {found}", flush=True)


class VersionedWorker(WorkerService):
    """A worker of a model and a version of the KV protocol; what runs has `drain` seconds to end when it leaves."""

    def __init__(self, role: str, name: str, model: Path, router: RouterService, protocol: int, drain: float):
        self.protocol = protocol
        super().__init__(role, name, str(model), [router], *FLAGS, *COMPUTING, "--shutdown-timeout", str(drain))

    def start(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.flow.launch_worker", str(self.protocol), *self.arguments]
        environ = {**os.environ, "PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--metrics-port", str(self.port)], stdout=self._log, stderr=subprocess.STDOUT, env=environ
        )

    def metric(self, name: str) -> float:
        """As it tells itself, summed."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return sum(value for _, value in samples(answer.read().decode(), name))


class Load:
    """Short greedy streams, one after the other in each of `width` lines, and others that are added."""

    def __init__(self, client: httpx.AsyncClient, router: RouterService, width: int):
        self.client = client
        self.router = router
        self.asked = prompts(64, shortest=10, longest=60, seed=31)
        self.streams: list[Stream] = []
        self._over = False
        self._lines = [asyncio.create_task(self._line()) for _ in range(width)]

    async def _line(self) -> None:
        while not self._over:
            await self.add(SHORT).whole()

    def add(self, tokens: int) -> Stream:
        prompt = self.asked[len(self.streams) % len(self.asked)]
        self.streams.append(Stream(self.client, self.router, prompt, tokens))
        return self.streams[-1]

    async def meanwhile(self, work: Callable[[], None]) -> None:
        """Do it in a thread. Raises as soon as a stream has failed."""
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.wait([working, *self._lines], return_when=asyncio.FIRST_COMPLETED)
        for line in self._lines:
            if line.done():
                line.result()
        await working

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._lines)


class GenerationRoll:
    """A router and the workers that serve now: `replace` has others take their place. Use as a context manager."""

    def __init__(self, model: Path):
        self._stack = ExitStack()
        self.model = model
        self.router = RouterService(str(model), *FLAGS, "--canary-interval", "0.5")
        self._stack.callback(self.router.stop)
        self.serving: list[VersionedWorker] = []
        self.mixed_pairs = 0.0
        self._count = 0

    def __enter__(self) -> GenerationRoll:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, model: Path, protocol: int, drain: float) -> list[VersionedWorker]:
        """A prefill and a decode worker, once the router gives them work."""
        self._count += 1
        roles = ("prefill", "decode")
        made = [VersionedWorker(r, f"{r}-{self._count}", model, self.router, protocol, drain) for r in roles]
        for worker in made:
            self._stack.callback(worker.stop)
        wait_until(lambda: self._known(made), START_SECONDS, f"new workers are known; {made[0].log()}")
        for worker in made:
            worker.step_back()
        return made

    def _known(self, workers: Sequence[VersionedWorker]) -> bool:
        for worker in workers:
            assert worker.process.poll() is None, worker.log()
        ready, _ = self.router.get("/health")
        names = {labels["engine"] for labels, _ in samples(self.router.get("/metrics")[1].decode(), "worker_draining")}
        return ready == 200 and {worker.name for worker in workers} <= names

    def replace(self, model: Path, protocol: int, drain: float = 0.3) -> None:
        """New workers beside those that serve, which leave once the new ones carry traffic."""
        before, self.serving = self.serving, self.start(model, protocol, drain)
        if before:
            decode = self.serving[1]
            wait_until(lambda: decode.metric("kv_handoffs_total") >= 5, 30.0, "the new workers carry traffic")
        for worker in before:
            self.mixed_pairs += worker.metric("mixed_pairs_total")
        for worker in before:  # all at once, as when a generation is taken out of the chart
            worker.process.terminate()
        for worker in before:
            assert worker.process.wait(60.0) == 0, worker.log()

    def all_mixed_pairs(self) -> float:
        """As the workers count them that there are, and those that have left did before they were told to."""
        return self.mixed_pairs + sum(worker.metric("mixed_pairs_total") for worker in self.serving)

    def generations(self) -> dict[str, float]:
        text = self.router.get("/metrics")[1].decode()
        return {labels["generation"]: share for labels, share in samples(text, "generation_share")}


async def roll(folder: Path, streams: int, width: int, tell: Callable[[str, object], None] = say) -> None:
    """All three rolls. Raises AssertionError where one failed, is wrong, KV was mixed, or something leaked."""
    models = [tiny_llama(folder / str(seed), seed=seed, max_position=LENGTH) for seed in (0, 7)]
    limits = httpx.Limits(max_connections=200)
    with GenerationRoll(models[0]) as made:
        made.replace(models[0], KV_PROTOCOL)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            load = Load(client, made.router, width)
            lasting = [load.add(LENGTH - 200) for _ in range(streams)]
            await begun(lasting, 5)
            for what, protocol, drain in (("same build", 0, 0.3), ("KV protocol", 1, 60.0)):
                began = time.monotonic()
                await load.meanwhile(lambda p=protocol, d=drain: made.replace(models[0], KV_PROTOCOL + p, d))
                tell(f"a roll to the {what}: seconds", f"{time.monotonic() - began:.1f}")
            far = [len(stream.tokens) for stream in lasting]
            await gone_further(lasting, 5)
            tell("streams that outlast both, and their tokens by then", f"{streams}, {min(far)} to {max(far)}")
            for stream in lasting:
                await stream.leave()
            ending = [load.add(LASTING) for _ in range(streams)]
            await begun(ending, 5)
            began = time.monotonic()
            await load.meanwhile(lambda: made.replace(models[1], KV_PROTOCOL + 1))
            tell("a roll to another model: seconds", f"{time.monotonic() - began:.1f}")
            for stream in ending:
                await stream.whole()
            await load.end()
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # several wait for each other at each operation, which small ones do not repay
            _check(load, models, tell)
            torch.set_num_threads(threads)
        assert made.all_mixed_pairs() == 0.0
        assert made.router.metric("request_failure_total") == 0.0
        await asyncio.to_thread(made.router.wait_idle)
        tell("requests failed, pairs mixed, generations at the end", f"0, 0, {len(made.generations())}")


def _check(load: Load, models: Sequence[Path], tell: Callable[[str, object], None]) -> None:
    """Each text is the one of a model, and both have written some."""
    texts = Counter((tuple(stream.prompt), tuple(stream.tokens)) for stream in load.streams if stream.tokens)
    of_model = [0, 0]
    for (prompt, tokens), count in texts.items():
        of = [is_greedy_tiny(model, prompt, tokens) for model in models]
        assert any(of), f"a text of neither model: {tokens}"
        of_model[of.index(True)] += count
    tell("texts exact: of the old model, of the new one", f"{of_model[0]}, {of_model[1]}")
    assert min(of_model) > 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=6, help="that last longer than a roll (default: 6)")
    parser.add_argument("--width", type=int, default=4, help="short streams at a time (default: 4)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_in:
        asyncio.run(roll(Path(made_in), given.streams, given.width))
