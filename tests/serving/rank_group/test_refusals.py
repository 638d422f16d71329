"""What cannot be spread over ranks is refused before a process starts, with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.worker.model_cache import check_model, load_from
from serving.config import ModelConfig
from tests.tiny import tiny_llama


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, r"--enable-expert-parallel asks for.*--mixed 2"),
        ({"enable_expert_parallel": True, "device": "cuda"}, "--device cpu alone"),
    ],
)
def test_what_ranks_are_not_for_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        check_model(tmp_path, ModelConfig(data_parallel_size=2, **settings))


def test_a_dense_model_is_refused_by_router_and_worker(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(data_parallel_size=2, enable_expert_parallel=True)
    for check in (check_model, load_from):
        with pytest.raises(ValueError, match=r"no experts to spread.*--mixed 2"):
            check(dense, config)


def test_one_rank_is_a_worker_as_any(tmp_path: Path) -> None:
    dense, config = tiny_llama(tmp_path / "dense"), ModelConfig(enable_expert_parallel=True)
    check_model(dense, config)
    assert load_from(dense, config).spec.moe is None
