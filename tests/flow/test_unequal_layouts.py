"""Workers whose ranks share a model hand KV over to workers of other layouts, and back: the text of one process.

Each has ranks that are processes of their own, and KV that lies as one process's does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV2Config

from deploy.local import LocalCluster
from deploy.worker.model_cache import load_from, release
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.loader.loading import LoadedModel
from serving.messages import Role
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import ask, served
from tests.kvcache.pool.nodes import Cluster as Pool
from tests.serving.model.oracle import DEEPSEEK, VOCAB, build, save
from tests.tiny import tiny_llama

pytestmark = pytest.mark.thorough

ONE = ModelConfig(dtype="float32")
TP2 = ModelConfig(dtype="float32", tensor_parallel_size=2)
PP2 = ModelConfig(dtype="float32", pipeline_parallel_size=2)
SP2 = ModelConfig(dtype="float32", prefill_context_parallel_size=2)
TP2_PP2 = ModelConfig(dtype="float32", tensor_parallel_size=2, pipeline_parallel_size=2)
EP2 = ModelConfig(dtype="float32", data_parallel_size=2, enable_expert_parallel=True)
TOKENS, BLOCK = 16, 16


class LayoutCluster(LocalCluster):
    """Workers in this process, each with a model of its own."""

    models: Sequence[LoadedModel]

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        self.model = self.models[number]
        return super()._worker(role, number, dialer)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three key-value heads, for two ranks one and two; three layers."""
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=3, hidden=48, heads=6, kv_heads=3)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V2 for prompts of several chunks."""
    config = DeepseekV2Config(**DEEPSEEK | {"max_position_embeddings": 256})
    return save(build(config), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def workers(path: Path, *models: tuple[Role, ModelConfig], pool: Pool | None = None) -> AsyncIterator[Cluster]:
    """Workers with these models; asserts idleness, and that nothing was refused or retried."""
    with ExitStack() as stack:
        loaded = [load_from(path, config) for _, config in models]
        for model in loaded:
            stack.callback(release, model)
        cluster = LayoutCluster(
            loaded[0],
            ONE,
            EngineConfig(num_kv_blocks=256, block_size=BLOCK, max_num_batched_tokens=60),
            RouterConfig(patience=20.0),
            roles=[role for role, _ in models],
            pool=PoolConfig(kvcache_fetch="always"),
            pool_nodes={address: pool.link(address) for address in pool.addresses} if pool is not None else None,
        )
        cluster.models = loaded
        async with cluster as started:
            watched = Cluster(started)
            yield watched
            await watched.idle_without_retries()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TP2, ONE),
        (ONE, TP2),
        (PP2, ONE),
        pytest.param(SP2, ONE, marks=pytest.mark.slow),
        pytest.param(TP2_PP2, ONE, marks=pytest.mark.slow),
    ],
    ids=["tp2-to-one", "one-to-tp2", "pp2-to-one", "sp2-to-one", "both-to-one"],
)
async def test_layouts_hand_over_to_each_other(
    prefill: ModelConfig, decode: ModelConfig, uneven: Path, own_threads: None
) -> None:
    """Prompts of one chunk and of several, and one again, whose prefix the prefill worker still has."""
    asked = [*prompts(3, shortest=20, longest=100, seed=90), *prompts(1, shortest=130, longest=150, seed=91)]
    async with workers(uneven, (Role.PREFILL, prefill), (Role.DECODE, decode)) as cluster:
        for prompt in [*asked, asked[0]]:
            assert await cluster.tokens(ask(prompt, TOKENS)) == greedy_tiny(uneven, prompt, TOKENS)
        sender, _ = cluster.cluster.workers
        assert sender.prefill.bytes_sent > 0


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TP2, ONE),
        pytest.param(ONE, TP2, marks=pytest.mark.slow),
        pytest.param(EP2, TP2, marks=pytest.mark.slow),
        pytest.param(TP2, EP2, marks=pytest.mark.slow),
    ],
    ids=["tp2-to-one", "one-to-tp2", "ep2-to-tp2", "tp2-to-ep2"],
)
async def test_latents_are_handed_over_between_layouts(
    prefill: ModelConfig, decode: ModelConfig, latent: Path, own_threads: None
) -> None:
    """Of MLA, which each tensor-parallel rank keeps whole; ranks that hold experts have what one process has."""
    asked = prompts(2, vocab=VOCAB, shortest=70, longest=90, seed=93)
    async with workers(latent, (Role.PREFILL, prefill), (Role.DECODE, decode)) as cluster:
        for prompt in asked:
            assert await cluster.tokens(ask(prompt, TOKENS)) == greedy_tiny(latent, prompt, TOKENS)
        sender, _ = cluster.cluster.workers
        assert sender.prefill.bytes_sent > 0


async def test_layouts_share_the_pool(uneven: Path, own_threads: None) -> None:
    """What one computed another reuses, in both directions."""
    [one, other] = prompts(2, shortest=100, longest=120, seed=92)
    reused = {len(prompt): (len(prompt) - 1) // BLOCK * BLOCK for prompt in (one, other)}
    async with Pool("local", 1) as pool:
        async with workers(uneven, (Role.MIXED, ONE), pool=pool) as alone:
            tokens, _ = await served(alone, ask(one, TOKENS))
            assert tokens == greedy_tiny(uneven, one, TOKENS)
        async with workers(uneven, (Role.MIXED, TP2), pool=pool) as group:
            assert await served(group, ask(one, TOKENS)) == (tokens, reused[len(one)])
            others, _ = await served(group, ask(other, TOKENS))
            assert others == greedy_tiny(uneven, other, TOKENS)
        async with workers(uneven, (Role.MIXED, ONE), pool=pool) as again:
            assert await served(again, ask(other, TOKENS)) == (others, reused[len(other)])
