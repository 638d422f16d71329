"""Rolls of real processes under constant load: of the same build, to a new KV protocol, to a new model.

No request fails, each text is that of one model, no KV went from one generation to the other, and nothing is left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.generation_roll import roll

pytestmark = pytest.mark.slow


async def test_no_request_fails_and_none_is_mixed_whatever_the_roll_is_to(tmp_path: Path) -> None:
    told: dict[str, object] = {}
    await roll(tmp_path, streams=2, width=2, tell=lambda what, found: told.update({what: found}))
    assert told["requests failed, pairs mixed, generations at the end"] == "0, 0, 1"
