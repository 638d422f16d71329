"""Fixtures: a scripted server in this loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.openai_server import ScriptedServer, scripted_server


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """An obedient server; change its `script` before the first request."""
    async with scripted_server() as running:
        yield running
