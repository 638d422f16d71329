"""Hundreds of connections that want nothing good: the client beside them is served, and the server is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.crowd import LITTLE_KV, undisturbed, visit
from tests.flow.server import MillraceServer

pytestmark = pytest.mark.slow

CROWD = 1000
TIMES = ("--header-timeout", "1", "--keep-alive-timeout", "1", "--body-timeout", "1")
MEMORY = 64 << 20  # bytes that a process which has served a thousand connections may keep


@pytest.mark.parametrize(
    ("flags", "room"),
    [pytest.param((), CROWD, id="room for all"), pytest.param(("--max-connections", "100"), 100, id="little room")],
)
def test_a_crowd_of_connections_harms_nobody(tiny_path: Path, flags: tuple[str, ...], room: int) -> None:
    given = (str(tiny_path), "--dtype", "float32", "--served-model-name", "tiny", *LITTLE_KV, *TIMES, *flags)
    with MillraceServer(*given, workers=("mixed-0",)) as server:
        text, _ = undisturbed(server, 10)
        seen = visit(server, CROWD, 30, text)
    assert seen.served.wrong == []
    assert len(seen.served.first) >= 10
    assert (seen.crowd["opened"], seen.crowd["not opened"], seen.crowd["open at the end"]) == (CROWD, 0, 0)
    assert seen.peak.descriptors <= seen.before.descriptors + room + 10
    assert seen.after.resident <= seen.before.resident + MEMORY
    if room == CROWD:
        assert seen.crowd["open at once"] > CROWD / 2
        assert {"silent", "header_timeout", "header_size", "keep_alive"} <= {
            why for why, count in seen.ended.items() if count
        }
    else:
        assert seen.ended["evicted"] > CROWD / 2
