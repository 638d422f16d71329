"""Prompts on one engine and decoding on another, where a finished prompt keeps its KV until decoding has room for it.

The order of admission is DistServe's, as its engine loops have it. Which sequences a step computes, which blocks they
hold and who gives way is up to the production schedulers and KV blocks.

    asked → prompts' queue → prompt computed, first token told → ready → accepted, moved → joins a batch → decodes
                             └─────── its KV here ────────────────────┘└────── its KV there ────────────────────────
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.scheduler import DecodeScheduler
from deploy.simulator.engine_loop import VirtualEngineLoop
from deploy.simulator.recorded_engines import (
    Machinery,
    check_room,
    continued,
    kv_of,
    new_sequence,
    prompt_scheduler,
)
from deploy.simulator.recorded_systems import SplitSystem
from serving.engine.engine import BegunStep, Engine
from serving.engine.run import RunResult
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import NoRoom
from serving.messages import Request

Tell = Callable[[SequenceOutput], None]


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step in the decode engine's pipeline, and when it leaves the last stage."""

    batch: Batch
    step: BegunStep
    result: RunResult
    ends: float


class Batch:
    """The sequences that go through the pipeline together: as many batches as stages."""

    def __init__(self, engine: Engine, scheduler: DecodeScheduler):
        self.engine = engine
        self.scheduler = scheduler


class SplitReplay:
    """One running SplitSystem. `tell` hears of every token."""

    def __init__(self, system: SplitSystem, machinery: Machinery, tell: Tell):
        self.system = system
        self.clock = machinery.clock
        self.tell = tell
        self.prompt_kv, self.kv = kv_of(system.prefill), kv_of(system.decode)
        self.prompts = prompt_scheduler(self.prompt_kv)
        self.prefill = VirtualEngineLoop(machinery.engine(system.prefill, self.prompt_kv, [self.prompts], 0))
        self.batches = [self._batch(machinery, 1 + stage) for stage in range(system.stages)]
        self.ready: deque[tuple[float, SequenceState]] = deque()  # computed when, with their KV where they were
        self.waiting: deque[SequenceState] = deque()  # taken over, in no batch yet
        self.swapped: deque[SequenceState] = deque()  # gave way, and come back before those that wait
        self._free = [0.0] * system.stages  # when each stage is
        self._sent: deque[SentStep | None] = deque()
        self._woken = asyncio.Event()
        self._deciding: asyncio.Task[None] | None = None

    def _batch(self, machinery: Machinery, number: int) -> Batch:
        scheduler = DecodeScheduler(self.kv, max_model_len=self.system.decode.max_model_len + 1)
        return Batch(machinery.engine(self.system.decode, self.kv, [scheduler], number), scheduler)

    def start(self) -> None:
        self.prefill.start([self], lambda: None)
        self._deciding = asyncio.create_task(self._decode())

    async def stop(self) -> None:
        assert self._deciding is not None
        self._deciding.cancel()
        await asyncio.gather(self._deciding, return_exceptions=True)
        await self.prefill.stop()

    def ask(self, request: Request) -> None:
        """Raises ValueError for a request that could never decode."""
        for kv in (self.prompt_kv, self.kv):
            check_room(kv, request)
        self.prompts.add(new_sequence(self.prompt_kv, request, stays=False, now=self.clock()))
        self.prefill.wake()

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Prompts that are computed (serving.engine.loop.OutputListener)."""
        for output in outputs:
            assert output.delta is not None
            if output.delta.finish is None:
                self.ready.append((self.clock(), output.seq))
                self._woken.set()
            else:
                self.prefill.end(output.seq)
            self.tell(output)

    async def _decode(self) -> None:
        """Batch after batch enters the pipeline; once that is full, the oldest step's tokens are waited for."""
        while True:
            for batch in self.batches:
                self._sent.append(self._send(batch))
                seen = self.clock()
                if len(self._sent) == len(self.batches):
                    seen = await self._finished(self._sent.popleft()) or seen
                await self._accept(seen)
            if not any(self._sent) and not self.waiting and not self.swapped and not self._running:
                await self._until_ready()

    @property
    def _running(self) -> int:
        return sum(len(batch.scheduler.running) for batch in self.batches)

    async def _until_ready(self) -> None:
        while not self.ready:
            self._woken.clear()
            await self._woken.wait()
        await self._accept(self.clock())

    def _send(self, batch: Batch) -> SentStep | None:
        """Those that wait join the batch, whose next step enters the first stage; None for an empty one."""
        self._join(batch.scheduler)
        now = self.clock()
        plan, gave_way = batch.engine.schedule(now)
        self.swapped += [continued(self.kv, output.seq, now) for output in gave_way]
        if not plan.work:
            return None
        step = batch.engine.begun(plan, now)
        result = batch.engine.runner.run(plan.work, None)
        through = result.times.forward / self.system.stages
        ends = now
        for stage, free in enumerate(self._free):
            ends = self._free[stage] = max(ends, free) + through
        return SentStep(batch, step, result, ends)

    def _join(self, scheduler: DecodeScheduler) -> None:
        """Those that gave way come first; where nothing decodes, not before those that wait and hold their room."""
        while self.swapped:
            if self._take_blocks(self.swapped[0]):
                scheduler.add(self.swapped.popleft())
            elif self._running:
                return
            else:
                break
        while self.waiting:
            scheduler.add(self.waiting.popleft())

    def _take_blocks(self, seq: SequenceState) -> bool:
        """Blocks for KV that is computed already; False while there are none."""
        try:
            self.kv.open(seq)
        except NoRoom:
            return False
        seq.computed = len(seq.tokens) - 1
        return True

    async def _finished(self, sent: SentStep | None) -> float | None:
        """Take a step's tokens. When that began: what happened since is seen after the next step alone."""
        if sent is None:
            return None
        await self._sleep_until(sent.ends)
        seen = self.clock()
        for output in sent.batch.engine.finish(sent.step, sent.result):
            self.tell(output)
        await self._sleep_until(seen + self.system.handling * len(sent.step.plan.work))
        return seen

    async def _accept(self, seen: float) -> None:
        """Take over what was ready when the loop last looked, in order, while little waits and there is room."""
        system, block = self.system, self.kv.block_size
        most = system.waiting_share * self.kv.allocator.num_blocks
        while self.ready and self.ready[0][0] <= seen:
            if sum(seq.prompt_len // block + 1 for seq in self.waiting) >= most:
                return
            done = self.ready[0][1]
            seq = continued(self.kv, done, self.clock())
            if not self._take_blocks(seq):
                return
            self.ready.popleft()
            self.waiting.append(seq)
            moving = system.move_seconds + system.move_token_seconds * done.prompt_len / system.stages
            for stage, free in enumerate(self._free):
                self._free[stage] = max(self.clock(), free) + moving
            if moving:
                await self._sleep_until(max(self._free))
                seen = self.clock()
            self.prefill.end(done)

    async def _sleep_until(self, when: float) -> None:
        if when > self.clock():
            await asyncio.sleep(when - self.clock())
