"""A front that starts workers says itself that there are no weights: a worker would end, begin again and end."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from deploy import serve
from deploy.children import alike
from deploy.runtime.settings import read_settings
from serving.messages import Role
from tests.tiny import tiny_llama


class StartedAfterAllError(Exception):
    """Workers would be started now."""


def starting(*given: Any) -> Any:
    raise StartedAfterAllError


@pytest.mark.parametrize(
    ("given", "counts", "found"),
    [
        ({}, {Role.MIXED: 1}, None),
        ({"load_format": "pool"}, {Role.MIXED: 1}, StartedAfterAllError),  # its workers may need none here
        ({}, {}, StartedAfterAllError),  # nor do a router's
    ],
)
@pytest.mark.parametrize("broken", ["missing", "damaged"])
async def test_it_is_told_before_any_worker_starts(
    given: dict[str, Any],
    counts: dict[Role, int],
    found: type[Exception] | None,
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_llama(tmp_path / "model", layers=1)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    if broken == "damaged":
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    told = {"missing": r"pytorch_model\.bin is not read", "damaged": "download it again"}[broken]
    settings = read_settings({"model": str(folder), "grpc_host": "127.0.0.1", "cluster_key": "k" * 32, **given})
    with socket.socket() as listening:
        monkeypatch.setattr(serve, "bind", lambda host, port: listening)
        monkeypatch.setattr(serve, "listen", starting)  # what comes first once all is checked
        with pytest.raises(found or ValueError, match=None if found else told):
            await serve.serve_front(settings, alike(counts, 0, settings))
