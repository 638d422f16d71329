"""A worker that starts from the pool, on hosts whose folders may not have room for the model on its way in."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.worker import model_cache
from deploy.worker.model_cache import ModelCache
from kvcache.pool.client import PoolClient
from kvcache.pool.models import push
from serving.config import ClusterConfig, ModelConfig, PoolConfig
from tests.kvcache.pool.nodes import Cluster, patient_client

NAME = "owner/model"


@dataclass(frozen=True)
class Loaded:
    """What stands for a model: its path, and the bytes that were there when it was loaded."""

    path: Path
    content: bytes


@pytest.mark.parametrize("full", [(), ("memory",), ("memory", "disk")])
async def test_a_model_comes_by_way_of_a_folder_with_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: tuple[str, ...]
) -> None:
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(model_cache, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(model_cache.tempfile, "tempdir", str(tmp_path / "disk"))
    real = model_cache.pull
    came: list[str] = []

    async def pull(pool: PoolClient, model: str, folder: Path) -> Path:
        came.append(folder.parent.name)
        if folder.parent.name in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return await real(pool, model, folder)

    def load(path: Path, config: ModelConfig, _: object) -> Any:
        return Loaded(path, path.read_bytes())

    monkeypatch.setattr(model_cache, "pull", pull)
    monkeypatch.setattr(model_cache, "load_from", load)
    cache = ModelCache(NAME, ModelConfig(load_format="pool"), PoolConfig(), ClusterConfig())
    async with Cluster("local", 1) as nodes:
        client = patient_client(nodes.link)
        client.set_nodes(nodes.addresses)
        (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)
        await push(client, NAME, tmp_path / "model.gguf")
        loaded = await cache._pooled(client)
        await client.close()
    assert came == ["memory", "disk"][: len(full) + 1]
    assert loaded == (Loaded(Path(NAME), b"weights" * 1000) if len(full) < 2 else None)
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == len(full)
    assert cache.lacking is None and not any((tmp_path / "memory").iterdir()) and not any((tmp_path / "disk").iterdir())
