"""Chaos on real processes behind a network that breaks: nobody's request fails, texts are exact, and all is well again.

The faults that no kill or freeze shows; `python -m tests.flow.chaos` runs every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.awake import retaken
from tests.flow.chaos.cluster import ChaosCluster
from tests.flow.chaos.load import Client
from tests.flow.chaos.run import run, undisturbed
from tests.flow.chaos.scenarios import BEATS_ALONE, ONE_OF_FOUR, RESETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tiny_path: Path) -> Iterator[ChaosCluster]:
    with ChaosCluster(tiny_path) as started:
        yield started


@retaken
async def test_requests_survive_what_breaks_between_processes(cluster: ChaosCluster, tiny_path: Path) -> None:
    async with Client(cluster.url) as client:
        texts = await undisturbed(tiny_path, client)
        for scenario, seconds in ((BEATS_ALONE, 5.0), (ONE_OF_FOUR, 5.0), (RESETS, 2.0)):
            result = await run(cluster, replace(scenario, seconds=seconds), client, texts)
            assert result.complaints() == [], f"{scenario.name}\n{cluster.log()}"
            harmless = not result.replacements and not result.watch.red
            assert not harmless, f"{scenario.name} did no harm"
