"""Engines of recorded systems: the production engine, schedulers and KV blocks around a modelled runner.

It builds them, and knows neither how a system's processes take turns nor what its requests ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from decode.scheduler import DecodeScheduler
from deploy.simulator.profiles import Profile
from deploy.simulator.recorded_systems import BLOCK_SIZE
from deploy.simulator.runner import ModelledRunner, lognormal
from deploy.simulator.texts import EOS, ScriptedTexts
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from prefill.chunking import FixedChunks
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine, StepLimits
from serving.engine.plan import Scheduler, StepPlan
from serving.engine.sequence import SequenceState
from serving.messages import LeaseId, LeaseOrder, Request, Slo


class SpareKV(KVCacheManager):
    """Opens a sequence where `spare` blocks stay free beside it, for those that grow."""

    def __init__(self, allocator: BlockAllocator, fingerprint: str, spare: int):
        super().__init__(allocator, fingerprint)
        self.spare = spare

    def open(self, seq: SequenceState, *, headroom: int = 0, waits: bool = False) -> None:
        super().open(seq, headroom=max(headroom, self.spare), waits=waits)


class WholePrompts(FixedChunks):
    """A prompt is part of a step as a whole or not at all; no other passes it."""

    def most(self, seq: SequenceState, plan: StepPlan) -> int:
        return plan.tokens if not plan.work or seq.uncomputed <= plan.tokens else 0


class DecodesAlone(DecodeScheduler):
    """Decodes in steps without prompts."""

    def fill(self, plan: StepPlan, now: float) -> None:
        if not plan.work:
            super().fill(plan, now)


@dataclass(frozen=True, slots=True)
class Machinery:
    """What all engines of one replay share: the virtual clock, the texts, and seeded noise of their steps."""

    clock: Callable[[], float]
    texts: ScriptedTexts
    noise: float
    seed: int

    def runner(self, profile: Profile, number: int) -> ModelledRunner:
        return ModelledRunner(profile, self.texts, lognormal(self.noise, self.seed * 4096 + number))

    def engine(self, profile: Profile, kv: KVCacheManager, schedulers: list[Scheduler], number: int) -> Engine:
        limits = StepLimits(
            max_num_batched_tokens=profile.max_num_batched_tokens,
            max_num_seqs=profile.max_num_seqs,
            max_model_len=profile.max_model_len + 1,
            eos_token_ids=frozenset({EOS}),
        )
        return Engine(self.runner(profile, number), kv, schedulers, limits, clock=self.clock)


def kv_of(profile: Profile, spare: float = 0.0) -> KVCacheManager:
    """The profile's KV without prefix reuse; a share of it may be kept `spare`."""
    blocks = profile.kv_tokens // BLOCK_SIZE
    allocator = BlockAllocator(blocks, BLOCK_SIZE, caching=False)
    return SpareKV(allocator, profile.model, round(spare * blocks))


def prompt_scheduler(kv: KVCacheManager, then: Callable[[SequenceState], None] | None = None) -> PrefillScheduler:
    """First come, first served, whole prompts."""
    return PrefillScheduler(kv, then, chunks=WholePrompts())


def new_sequence(kv: KVCacheManager, request: Request, *, stays: bool, now: float) -> SequenceState:
    """A prompt that no engine has seen. Its objectives stay with who asks: these systems decide nothing by them."""
    order = LeaseOrder(
        lease=LeaseId(lease=request.request_id, epoch=0, instance="recorded"), request=replace(request, slo=Slo())
    )
    return SequenceState(order, root=kv.root(request.tenant, False), stays=stays, now=now)


def check_room(kv: KVCacheManager, request: Request) -> None:
    """Raises ValueError for a text that all of the KV could not hold."""
    if kv.blocks_for(request.longest + 1) > kv.allocator.num_blocks:
        most = kv.allocator.num_blocks * kv.block_size
        raise ValueError(f"request {request.request_id} may come to {request.longest} tokens; the KV holds {most}")


def continued(kv: KVCacheManager, seq: SequenceState, now: float) -> SequenceState:
    """The same text in a sequence of its own, which holds no KV yet and will decode where it is."""
    order = replace(seq.order, generated=tuple(seq.output))
    return SequenceState(order, root=kv.root(seq.request.tenant, False), stays=True, now=now)
