"""A model that drafts for one that several ranks compute: the text is that of one process without drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deploy.local import LocalCluster
from deploy.worker.model_cache import load_from, release
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from tests.fakes.drafting import drafts_always
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import ask
from tests.serving.model.oracle import VOCAB, build, configs, save

pytestmark = pytest.mark.thorough

TOKENS = 16
EP2 = ModelConfig(dtype="float32", data_parallel_size=2, enable_expert_parallel=True)
TP2 = ModelConfig(dtype="float32", tensor_parallel_size=2)


@pytest.mark.parametrize("config", [EP2, pytest.param(TP2, marks=pytest.mark.slow)], ids=["ep2", "tp2"])
async def test_drafts_change_no_token(config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_always(monkeypatch)
    threads = torch.get_num_threads()
    path = save(build(configs()["mixtral"]), tmp_path / "mixtral")
    drafting = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    engine = EngineConfig(num_kv_blocks=64, max_num_batched_tokens=40, speculative_config=json.dumps(drafting))
    model = load_from(path, config)
    try:
        async with LocalCluster(model, config, engine, RouterConfig(patience=20.0)) as started:
            cluster = Cluster(started)
            for prompt in prompts(2, vocab=VOCAB, shortest=30, longest=60, seed=17):
                assert await cluster.tokens(ask(prompt, TOKENS)) == greedy_tiny(path, prompt, TOKENS)
            counters = started.workers[0].status().counters
            assert counters["spec_decode_num_accepted_tokens"] > TOKENS
            await cluster.idle()
    finally:
        release(model)
        torch.set_num_threads(threads)
