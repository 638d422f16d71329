"""The handoff: every layer's tokens leave once, in order, in chunks of a bounded size, as soon as they are computed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk, split, verify
from kvcache.handoff.sender import Handoff, HandoffProgress
from serving.errors import StaleLease
from tests.fakes.kv_layouts import LAYOUTS, random_pool, token_at
from tests.fakes.sequences import lease_id, make_sequence

LAYERS = st.integers(1, 6)


def drain(plan: HandoffProgress, sent: list[list[int]]) -> None:
    """Take all that may leave, checking each piece."""
    while (piece := plan.next()) is not None:
        layers, start, end = piece
        assert len(layers) >= 1 and end > start
        room = max(1, handoffs.CHUNK_BYTES // plan.token_bytes)
        assert len(layers) * (end - start) <= room, "a chunk is larger than agreed"
        for layer in layers:
            assert end <= plan.ready[layer], "tokens left before they were computed"
            sent[layer] += range(start, end)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), layers=LAYERS, start=st.integers(0, 20), length=st.integers(1, 60))
def test_any_interleaving_sends_every_token_of_every_layer_once_and_in_order(
    data: st.DataObject, layers: int, start: int, length: int
) -> None:
    token_bytes = data.draw(st.sampled_from([1, handoffs.CHUNK_BYTES // 7, handoffs.CHUNK_BYTES, 1 << 30]))
    plan = HandoffProgress(layers, start, start + length, token_bytes)
    sent: list[list[int]] = [[] for _ in range(layers)]
    stops = data.draw(st.lists(st.integers(0, start + length), max_size=4))
    for upto in [*sorted(stops), start + length + data.draw(st.integers(0, 1))]:  # a step may draw a token more
        for layer in range(layers):
            plan.layer_done(layer, upto)
            if data.draw(st.booleans()):
                drain(plan, sent)
    assert not plan.done or all(len(tokens) == length for tokens in sent)
    drain(plan, sent)
    assert plan.done
    assert sent == [list(range(start, start + length))] * layers


@settings(max_examples=100, deadline=None)
@given(layers=LAYERS, upto=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_progress_never_goes_back(layers: int, upto: list[int]) -> None:
    plan = HandoffProgress(layers, 4, 20, 1)
    for value in upto:
        plan.layer_done(0, value)
    assert plan.ready[0] == max(4, min(20, max(upto)))


def test_layers_wait_for_those_that_follow_until_they_fill_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 25)
    plan = HandoffProgress(5, 0, 10, 1)
    for layer, leaving in enumerate([None, (range(2), 0, 10), None, (range(2, 4), 0, 10), (range(4, 5), 0, 10)]):
        plan.layer_done(layer, 10)
        assert plan.next() == leaving, "two layers fill a chunk; the last one has nothing to wait for"
        assert plan.next() is None
    assert plan.done


def test_what_a_step_leaves_over_does_not_wait_for_the_next_one() -> None:
    plan = HandoffProgress(3, 0, 10, 1)
    for layer in range(3):
        assert plan.next() is None
        plan.layer_done(layer, 4)
    assert plan.next() == (range(3), 0, 4)
    plan.layer_done(0, 10)
    assert plan.next() is None and not plan.done


class RecordingLink:
    """A HandoffLink that keeps what it is given, or refuses from some chunk on."""

    room = None

    def __init__(self, refuse_at: int | None = None):
        self.chunks: list[Chunk] = []
        self.refuse_at = refuse_at
        self.pushed = asyncio.Event()

    async def push(self, chunk: Chunk) -> None:
        await asyncio.sleep(0)
        if self.refuse_at is not None and len(self.chunks) >= self.refuse_at:
            raise StaleLease("the lease is over", code="lease")
        self.chunks.append(chunk)
        self.pushed.set()

    async def commit(self, commit: object) -> None: ...
    async def close(self) -> None: ...


@pytest.mark.parametrize("name", LAYOUTS)
async def test_the_kv_that_leaves_is_the_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer and step by step; the first five tokens are there already."""
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 64)
    specs = LAYOUTS[name] * 2
    device_kv = random_pool(specs, 8, 4, 1)
    seq = make_sequence(None, range(23))
    seq.blocks = [6, 1, 7, 0, 3, 2]
    link = RecordingLink()
    handoff = Handoff(device_kv, link, seq, lease_id(epoch=2), "layout", 5)
    running = asyncio.create_task(handoff.run())
    for upto in (3, 12, 23):
        for layer in range(len(specs)):
            handoff.layer_done(layer, upto)
            await asyncio.sleep(0)
    await running
    got: list[list[tuple[int, bytes]]] = [[] for _ in specs]
    for chunk in link.chunks:
        verify(chunk, device_kv)
        assert (chunk.lease, chunk.layout) == (lease_id(epoch=2), "layout")
        for layer, parts in enumerate(split(chunk, device_kv), chunk.first_layer):
            rows = [b"".join(part[i].tobytes() for part in parts) for i in range(chunk.end - chunk.start)]
            got[layer] += zip(range(chunk.start, chunk.end), rows, strict=True)
    for layer, tokens in enumerate(got):
        assert tokens == [(p, token_at(device_kv, layer, seq.blocks, p)) for p in range(5, 23)]
    assert handoff.bytes_sent == sum(len(chunk.payload) for chunk in link.chunks)


async def test_a_layer_leaves_while_the_next_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", 1)
    device_kv = random_pool(LAYOUTS["float32"], 2, 4, 1)
    seq = make_sequence(None, range(8))
    seq.blocks = [1, 0]
    link = RecordingLink()
    handoff = Handoff(device_kv, link, seq, lease_id(), "layout", 0)
    running = asyncio.create_task(handoff.run())
    handoff.layer_done(0, 8)
    await link.pushed.wait()
    assert [(chunk.first_layer, chunk.last_layer) for chunk in link.chunks] == [(0, 1)] and not running.done()
    handoff.layer_done(1, 8)
    handoff.layer_done(2, 8)
    await running


async def test_a_refusal_ends_the_handoff() -> None:
    device_kv = random_pool(LAYOUTS["float32"], 2, 4, 1)
    seq = make_sequence(None, range(8))
    seq.blocks = [1, 0]
    handoff = Handoff(device_kv, RecordingLink(refuse_at=0), seq, lease_id(), "layout", 0)
    for layer in range(3):
        handoff.layer_done(layer, 8)
    with pytest.raises(StaleLease):
        await handoff.run()
