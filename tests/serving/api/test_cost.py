"""What a body costs before anything is generated grows no faster than the body, in time and in memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from math import inf

import httpx
import pytest

from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying
from tests.serving.api.growing import FAMILIES, OF_RESPONSES

pytestmark = pytest.mark.thorough

SIZE = 64 << 10  # bytes, and twice as many
MS_PER_KIB = 4.0  # CPU time; a grammar that compiles takes the most
FLOOR_MS = 8.0  # what a clock and a scheduler may add
MOST_TURNS = 12  # the least of so many is what a body costs when it has the processor's caches for itself
BYTES_PER_BYTE = 400  # at most, at the same time


@pytest.fixture(scope="module", autouse=True)
def own_heap() -> Iterator[None]:
    """What the tests before these have made is not looked at by any collection, and need not be for each of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_collections(own_heap: None) -> Iterator[None]:
    """None in the middle, as in the process that reads bodies: when one comes depends on the tests before."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def cost(client: httpx.AsyncClient, path: str, body: bytes) -> float:
    """CPU milliseconds of one request."""
    began = time.process_time()
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    spent = 1e3 * (time.process_time() - began)
    assert answer.status_code in (200, 400, 404, 413, 422), answer.text[:300]
    assert len(answer.content) < 20 * len(body) + (64 << 10)  # of 256 choices at most
    return spent


def allowed(body: bytes) -> float:
    """Milliseconds."""
    return MS_PER_KIB * len(body) / 1024 + FLOOR_MS


@pytest.mark.parametrize("family", FAMILIES)
async def test_twice_the_body_costs_twice_as_much(tokenizer: Tokenizer, family: str) -> None:
    path, make = FAMILIES[family]
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer)) as client:
        await cost(client, path, make(64))
        small, large = make(SIZE), make(2 * SIZE)
        growth, one, two = len(large) / len(small), inf, inf
        for turn in range(MOST_TURNS):  # in turn: others on the machine can make either cost twice as much for a while
            one, two = min(one, await cost(client, path, small)), min(two, await cost(client, path, large))
            within = one <= allowed(small) and two <= allowed(large)
            if turn >= 2 and within and two <= 1.5 * growth * one + FLOOR_MS:
                break
    for body, milliseconds in ((small, one), (large, two)):
        assert milliseconds <= allowed(body)
    assert two <= 1.5 * growth * one + FLOOR_MS, f"{len(small)} bytes took {one:.1f} ms, {len(large)} took {two:.1f}"


@pytest.mark.parametrize("family", FAMILIES)
async def test_memory_is_in_proportion(tokenizer: Tokenizer, family: str) -> None:
    path, make = FAMILIES[family]
    body = make(SIZE)
    async with calling(app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)) as client:
        await client.post(path, content=make(64))
        tracemalloc.start()
        try:
            await client.post(path, content=body, headers={"content-type": "application/json"})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak <= BYTES_PER_BYTE * len(body) + (4 << 20)


def test_no_family_hides_another_of_its_name() -> None:
    assert OF_RESPONSES.items() <= FAMILIES.items()
