"""Random bodies get an answer in time, and no 500; tests.serving.api.fuzzing does so for hours."""

from __future__ import annotations

import gc

import pytest

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying
from tests.serving.api.fuzzing import bodies, fuzz

pytestmark = pytest.mark.thorough

COUNT = 2_000


async def test_random_bodies(tokenizer: Tokenizer) -> None:
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "fine")), tokenizer)) as client:
        gc.collect()
        gc.freeze()  # a collection looks at what the bodies make, not at all that the process has
        try:
            found = await fuzz(client, range(COUNT))
        finally:
            gc.unfreeze()
    assert found.wrong == []
    assert found.statuses[200] > COUNT / 20 and found.statuses[400] > COUNT / 4, "bodies of both kinds are needed"


def test_a_seed_names_one_body() -> None:
    assert [bodies(seed) for seed in range(500)] == [bodies(seed) for seed in range(500)]
