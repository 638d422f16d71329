"""Claims of late requests that would not have given way to whoever asks."""

from __future__ import annotations

import pytest

from decode.giving_way import LONGEST
from serving.errors import NoRoom
from serving.messages import Role
from tests.decode.test_giving_way import PROMPT
from tests.decode.workers import Worker


@pytest.mark.parametrize("left, priority", [(-1.0, 50), (-LONGEST - 1.0, 0)], ids=["less important", "waited enough"])
async def test_a_late_router_has_its_turn_before_those_it_would_not_give_way_to(left: float, priority: int) -> None:
    worker = Worker(Role.DECODE, seqs=4)
    a, b = [await worker.worker.decode.connect(name, lambda *_: None, lambda _: None) for name in "ab"]
    for number in range(4):
        await worker.lease(a, PROMPT, f"a/{number}", first_token_in=1.0, priority=priority)
    with pytest.raises(NoRoom):
        await worker.lease(b, PROMPT, "b/0", first_token_in=left)
    a.cancel("a/0")
    with pytest.raises(NoRoom, match="keeps its room for another router"):
        await worker.lease(a, PROMPT, "a/4", first_token_in=1.0, priority=priority)
