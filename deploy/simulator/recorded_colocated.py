"""Prompts and decoding on one engine that never mixes them in a step: prompts go first, as in vLLM 0.2.

Which sequences a step computes, which blocks they hold and who gives way is up to the production schedulers and KV
blocks. A sequence that gave way is computed again, before prompts that have not begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.simulator.engine_loop import VirtualEngineLoop
from deploy.simulator.recorded_engines import (
    DecodesAlone,
    Machinery,
    check_room,
    continued,
    kv_of,
    new_sequence,
    prompt_scheduler,
)
from deploy.simulator.recorded_split import Tell
from deploy.simulator.recorded_systems import ColocatedSystem
from serving.engine.sequence import SequenceOutput
from serving.messages import Request


class ColocatedReplay:
    """One running ColocatedSystem. `tell` hears of every token."""

    def __init__(self, system: ColocatedSystem, machinery: Machinery, tell: Tell):
        self.clock = machinery.clock
        self.tell = tell
        self.kv = kv_of(system.engine, system.spare)
        self.decodes = DecodesAlone(self.kv, max_model_len=system.engine.max_model_len + 1)
        self.prompts = prompt_scheduler(self.kv, self.decodes.add)
        self.loop = VirtualEngineLoop(machinery.engine(system.engine, self.kv, [self.prompts, self.decodes], 0))

    def start(self) -> None:
        self.loop.start([self], lambda: None)

    async def stop(self) -> None:
        await self.loop.stop()

    def ask(self, request: Request) -> None:
        """Raises ValueError for a request that could never be computed."""
        check_room(self.kv, request)
        self.prompts.add(new_sequence(self.kv, request, stays=True, now=self.clock()))
        self.loop.wake()

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Tokens, and sequences that gave way (serving.engine.loop.OutputListener)."""
        for output in outputs:
            if output.error is None:
                self.tell(output)
            else:
                self.prompts.queue.insert(0, continued(self.kv, output.seq, self.clock()))
                self.loop.wake()
