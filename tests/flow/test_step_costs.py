"""A worker on a real model learns what its steps take, says so, and knows it again after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import LocalCluster
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.loader.loading import LoadedModel
from serving.messages import Role
from serving.step_cost import StepLoad
from tests.fakes.sequences import make_request
from tests.flow.conftest import Cluster


def cluster(model: LoadedModel, role: Role = Role.MIXED) -> LocalCluster:
    config = EngineConfig(num_kv_blocks=64, max_num_batched_tokens=16, kernels="torch")
    return LocalCluster(model, ModelConfig(), config, RouterConfig(), roles=(role,))


async def test_what_was_learned_is_there_after_a_restart(
    tiny_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.worker.step_costs.cache_folder", lambda: tmp_path)
    async with cluster(tiny_model) as first:
        assert first.workers[0].status().step_cost.samples == 0  # type: ignore[union-attr]
        served = Cluster(first)
        for seed in range(4):
            await served.tokens(make_request(range(seed, 40 + seed), request_id=f"r{seed}", max_tokens=40))
        await served.idle()
        status = first.workers[0].status()
        cost = status.step_cost
        assert cost is not None and cost.samples > 0 and status.max_batched_tokens == 16
        totals = first.workers[0].engine.totals
        mean = totals.step_seconds / totals.steps
        assert 0.2 * mean < cost.seconds(StepLoad.of(40, 1)) < 5 * mean
    async with cluster(tiny_model) as second, cluster(tiny_model, Role.PREFILL) as other:
        learned = second.workers[0].status().step_cost
        assert learned is not None and learned.samples > 0
        assert learned.seconds(StepLoad.of(40, 1)) == pytest.approx(cost.seconds(StepLoad.of(40, 1)), rel=1.0)
        assert other.workers[0].status().step_cost.samples == 0, "another role has another cost"  # type: ignore[union-attr]
