"""Texts that have grown past what any prefill worker can hold go on after a failure: who decodes computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from decode.scheduler import DecodeScheduler
from deploy.local import LocalCluster
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.errors import ContextLengthExceeded, InvalidRequest, NoRoom, Preempted
from serving.loader.loading import LoadedModel
from serving.messages import LeaseId, LeaseOrder, PrefillOrder, Request, Role, SamplingParams
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.remote import RemoteCluster

pytestmark = pytest.mark.thorough

LIMIT = 96  # tokens a prefill worker holds
TOKENS = 90


def config(blocks: int) -> EngineConfig:
    return EngineConfig(num_kv_blocks=blocks, num_speculative_tokens=0)


class UnequalLocal(LocalCluster):
    """The first worker has room for one sequence of LIMIT tokens, the others as `blocks` says."""

    blocks = 64

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        self.engine_config = config(self.blocks if number else LIMIT // 16)
        return super()._worker(role, number, dialer)


class UnequalRemote(RemoteCluster):
    """The same behind gRPC servers."""

    blocks = 64

    async def _serve(self, role: Role, number: int) -> None:
        self.engine_config = config(self.blocks if number else LIMIT // 16)
        await super()._serve(role, number)


@asynccontextmanager
async def split(
    model: LoadedModel, decode: int, kind: type[UnequalLocal | UnequalRemote] = UnequalLocal, **settings: Any
) -> AsyncIterator[Cluster]:
    roles = [Role.PREFILL] + [Role.DECODE] * decode
    cluster = kind(model, ModelConfig(), EngineConfig(), RouterConfig(patience=10.0), roles=roles)
    for name, value in settings.items():
        setattr(cluster, name, value)
    async with cluster as started:
        watched = Cluster(started)
        yield watched
        await watched.idle()


def request(name: int, prompt: list[int], tokens: int = TOKENS) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return Request(request_id=f"r{name}", prompt=tuple(prompt), sampling=sampling)


async def test_texts_that_lose_their_blocks_go_on(tiny_model: LoadedModel, tiny_path: Path) -> None:
    """Three texts of up to 150 tokens, and blocks for two."""
    wanted = prompts(3, shortest=60, longest=60, seed=80)
    async with split(tiny_model, decode=1, blocks=20) as cluster:
        found = await asyncio.gather(*(cluster.tokens(request(i, prompt)) for i, prompt in enumerate(wanted)))
        assert any(isinstance(error, Preempted) for error in cluster.seen.replacements), "there was too much room"
    assert found == [greedy_tiny(tiny_path, prompt, TOKENS) for prompt in wanted]


def preempt(worker: Worker, after: int) -> None:
    """Let the worker's first text lose its blocks as soon as it has so many tokens."""
    scheduler = worker.engine.schedulers[0]
    assert isinstance(scheduler, DecodeScheduler)
    fill, grow = scheduler.fill, scheduler.kv.grow
    lost: list[SequenceState] = []

    def lose(seq: SequenceState) -> None:
        if seq.output_len == after and (not lost or seq is lost[0]):  # however often it is tried
            lost[:] = [seq]
            raise NoRoom("these blocks are wanted elsewhere")
        grow(seq)

    def fill_losing(plan: StepPlan, now: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler.kv, "grow", lose)
            patch.setattr(scheduler, "_grown", lambda rows, plan: None)  # which asks for blocks only where one is full
            fill(plan, now)

    scheduler.fill = fill_losing  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [UnequalLocal, UnequalRemote])
@pytest.mark.parametrize("after", [50, TOKENS - 1])
async def test_a_text_goes_on_from_any_token(
    tiny_model: LoadedModel, tiny_path: Path, kind: type[UnequalLocal | UnequalRemote], after: int
) -> None:
    """It loses its blocks with so many tokens written, be it all but one: more than the prefill worker can hold."""
    prompt = prompts(1, shortest=60, longest=60, seed=81)[0]
    async with split(tiny_model, decode=1, kind=kind) as cluster:
        preempt(cluster.cluster.workers[1], after)
        assert await cluster.tokens(request(0, prompt)) == greedy_tiny(tiny_path, prompt, TOKENS)
        assert [type(error) for error in cluster.seen.replacements] == [Preempted]


@pytest.mark.parametrize("kind", [UnequalLocal, UnequalRemote])
async def test_a_prompt_no_prefill_worker_holds_is_refused_before_any_token(
    tiny_model: LoadedModel, kind: type[UnequalLocal | UnequalRemote]
) -> None:
    """Decode workers compute what they must, not what they could."""
    async with split(tiny_model, decode=1, kind=kind) as cluster:
        with pytest.raises(ContextLengthExceeded) as refused:
            await cluster.tokens(request(0, prompts(1, shortest=200, longest=200)[0]))
        assert refused.value.status == 400 and refused.value.param == "prompt"
        assert str(LIMIT) in refused.value.message and "200" in refused.value.message
        assert len(await cluster.tokens(request(1, prompts(1, shortest=LIMIT - 10, longest=LIMIT - 10)[0], 5))) == 5


async def test_a_decode_worker_computes_no_prompt_of_anothers_lease(tiny_model: LoadedModel) -> None:
    async with split(tiny_model, decode=1) as cluster:
        fence = LeaseId(lease="lease", epoch=0, instance="another")
        order = PrefillOrder(order=LeaseOrder(lease=fence, request=request(0, [5, 6, 7])), grant=None)
        with pytest.raises(InvalidRequest):
            await anext(aiter(cluster.cluster.workers[1].run(order)))
