"""How well an engine's steps are predicted by the cost it has learned so far, before and after its load changes.

    python -m bench.step_prediction [MODEL] [--seconds 60] [--trace FILE]

Each step is predicted by the fit as it was before that step, and compared with its cadence. The first half is chats;
then long prompts come beside more of them. It runs a worker's engine, schedulers, KV manager and kernels in this
process, with clients that each ask again when they have been answered; no sockets, no router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import aligned
from decode.scheduler import DecodeScheduler
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.memory.device import DeviceKV, token_bytes
from prefill.scheduler import PrefillScheduler
from serving.config import EngineConfig
from serving.engine.engine import Engine, StepLimits
from serving.engine.loop import EngineLoop
from serving.engine.plan import StepRecord
from serving.engine.runner import ModelRunner
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.engine.step_fit import StepFit
from serving.engine.step_meter import StepMeter
from serving.engine.step_prior import guessed_cost
from serving.forward.choose import make_forward, make_sampler
from serving.loader.loading import LoadedModel, load, resolve
from serving.messages import LeaseId, LeaseOrder, Request, SamplingParams
from serving.step_cost import StepCost

CONTEXT = 2048  # tokens a sequence may have
BLOCKS, BLOCK_SIZE = 2048, 16
SETTLED = 0.5  # of a half's seconds, at its end, in which the fit has had time
AFTER_CHANGE = 3.0  # seconds that are shown apart
REGIMES = ("decodes alone", "prompts alone", "decodes and prompts")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that ask again and again: shortest and longest prompt, output, and pause between requests, in seconds."""

    clients: int
    shortest: int
    longest: int
    output: int
    pause: float = 0.0


CHATS = [ClosedLoop(6, 32, 256, 96, pause=0.2)]
LONG = [ClosedLoop(12, 32, 256, 96, pause=0.2), ClosedLoop(2, 1000, 1500, 32, pause=0.5)]


@dataclass(frozen=True, slots=True)
class Step:
    """One step, when it ended (seconds since the start), and what was predicted for it."""

    at: float
    record: StepRecord
    predicted: float

    @property
    def regime(self) -> str:
        load, prompt = self.record.load, self.record.prompt_tokens
        return REGIMES[0] if not prompt else REGIMES[1] if prompt == load.new_tokens else REGIMES[2]

    @property
    def error(self) -> float:
        return abs(self.predicted / self.record.cadence_seconds - 1.0)


class Served:
    """An engine over a real model, its clients, and every step with its prediction."""

    def __init__(self, model: LoadedModel, config: EngineConfig):
        specs = model.spec.kv_layers(model.dtype)
        device_kv = DeviceKV(specs, BLOCKS, BLOCK_SIZE, "cpu")
        forward = make_forward(model, device_kv.planes, config, CONTEXT)
        weights = sum(weight.nbytes for weight in model.model.parameters())
        self.meter = StepMeter(
            StepFit(guessed_cost(model.spec, weight_bytes=weights, kv_bytes=token_bytes(specs), device="cpu"))
        )
        self.kv = KVCacheManager(BlockAllocator(BLOCKS, BLOCK_SIZE, caching=False), model.fingerprint)
        decoding = DecodeScheduler(self.kv, max_model_len=CONTEXT)
        self.prefilling = PrefillScheduler(self.kv, decoding.add, self._stepped)
        runner = ModelRunner(forward, model.spec, BLOCK_SIZE, sampler=make_sampler(forward))
        limits = StepLimits(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=CONTEXT,
            eos_token_ids=frozenset(),
        )
        self.engine = Engine(runner, self.kv, [decoding, self.prefilling], limits, lock=threading.RLock())
        self.loop = EngineLoop(self.engine)
        self.vocab = model.spec.vocab_size
        self.chance = random.Random(7)
        self.began = time.monotonic()
        self.steps: list[Step] = []
        self.costs: list[tuple[float, StepCost]] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def _stepped(self, record: StepRecord) -> None:
        predicted = self.meter.cost().seconds(record.load)
        self.steps.append(Step(time.monotonic() - self.began, record, predicted))
        self.meter.stepped(record)

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Answer the clients whose sequences have ended (serving.engine.loop.OutputListener)."""
        for output in outputs:
            if output.error is not None or (output.delta is not None and output.delta.finish is not None):
                answered = self._waiting.pop(id(output.seq), None)
                if answered is not None and not answered.done():
                    answered.set_result(None)

    async def ask(self, traffic: ClosedLoop) -> None:
        """One request, to its last token."""
        length = self.chance.randint(traffic.shortest, traffic.longest)
        prompt = tuple(self.chance.randrange(self.vocab) for _ in range(length))
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=SamplingParams(max_tokens=traffic.output, temperature=0.0, ignore_eos=True),
        )
        order = LeaseOrder(lease=LeaseId(lease=request.request_id, epoch=0, instance="bench"), request=request)
        seq = SequenceState(order, root=self.kv.root("", False, None), stays=True, now=self.engine.clock())
        answered = self._waiting[id(seq)] = asyncio.get_running_loop().create_future()
        with self.engine.lock:
            self.kv.open(seq)
            self.prefilling.add(seq)
        self.loop.wake()
        try:
            await answered
        finally:
            self.loop.end(seq)

    async def client(self, traffic: ClosedLoop) -> None:
        while True:
            await self.ask(traffic)
            await asyncio.sleep(self.chance.expovariate(1 / traffic.pause) if traffic.pause else 0.0)

    async def load(self, traffics: Sequence[ClosedLoop], seconds: float) -> None:
        """Keep this traffic up for so long; the fit has its turn as heartbeats give it."""
        clients = [asyncio.create_task(self.client(one)) for one in traffics for _ in range(one.clients)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.5)
            self.meter.fit.refit(self.engine.clock())
            self.costs.append((time.monotonic() - self.began, self.meter.cost()))
        for task in clients:
            task.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        failed = [error for error in ends if error is not None and not isinstance(error, asyncio.CancelledError)]
        if failed:
            raise failed[0]

    async def serve(self, seconds: float) -> float:
        """Both halves of the load; when the second began."""
        self.loop.start([self], lambda: sys.exit("the engine died"))
        self.began = time.monotonic()
        await self.load(CHATS, seconds / 2)
        changed = time.monotonic() - self.began
        await self.load(LONG, seconds / 2)
        await self.loop.stop()
        return changed


def windows(changed: float, seconds: float) -> list[tuple[str, float, float]]:
    """Name, first and last second of the spans that are compared."""
    return [
        ("from the start", 0.0, changed * (1 - SETTLED)),
        ("settled", changed * (1 - SETTLED), changed),
        (f"{AFTER_CHANGE:g} s after the change", changed, changed + AFTER_CHANGE),
        ("settled again", changed + (seconds - changed) * (1 - SETTLED), seconds),
    ]


def table(steps: Sequence[Step], spans: Sequence[tuple[str, float, float]]) -> str:
    """Median absolute relative errors by span and regime, with the number of steps and their median milliseconds."""
    rows = [["span", "regime", "steps", "median ms", "median error", "90 %"]]
    for name, first, last in spans:
        within = [step for step in steps if first <= step.at < last]
        for regime in (*REGIMES, "all"):
            found = [step for step in within if regime in ("all", step.regime)]
            if len(found) < 2:
                continue
            errors = sorted(step.error for step in found)
            cadence = statistics.median(step.record.cadence_seconds for step in found)
            most = errors[int(0.9 * len(errors))]
            rows.append(
                [
                    name,
                    regime,
                    str(len(found)),
                    f"{1e3 * cadence:.1f}",
                    percent(statistics.median(errors)),
                    percent(most),
                ]
            )
    return aligned(rows)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write_trace(path: Path, steps: Sequence[Step], costs: Sequence[tuple[float, StepCost]]) -> None:
    """Every step as a line of JSON, then every fit."""
    with path.open("w") as file:
        for step in steps:
            record = step.record
            told = {"at": step.at, "load": asdict(record.load), "prompt_tokens": record.prompt_tokens}
            told |= {"seconds": record.cadence_seconds, "own": record.step_seconds, "predicted": step.predicted}
            file.write(json.dumps(told) + "\n")
        for at, cost in costs:
            file.write(json.dumps({"at": at, "cost": asdict(cost)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_prediction", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub name (default: the demo model)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of both halves together (default: 60)")
    parser.add_argument("--quantization", choices=("int8",), help="as of `millrace serve`")
    parser.add_argument("--threads", type=int, help="compute threads (default: this process's CPUs)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every step and every fit here, as JSON lines")
    arguments = parser.parse_args()
    served = Served(
        load(resolve(arguments.model), quantization=arguments.quantization), EngineConfig(threads=arguments.threads)
    )
    changed = asyncio.run(served.serve(arguments.seconds))
    print(table(served.steps, windows(changed, arguments.seconds)))
    decode, prompts = served.meter.fit.errors
    print(f"\nlast fit: {served.meter.cost()}")
    print(f"deviation of ln(observed / predicted): {decode or 0:.3f} without prompts, {prompts or 0:.3f} with")
    if arguments.trace is not None:
        write_trace(arguments.trace, served.steps, served.costs)


if __name__ == "__main__":
    main()
