"""What a step and a handoff ask of the host: launching waits for nothing, and copies keep to streams of their own."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from serving.model.spec import ModelSpec
from serving.streams import DEFAULT
from tests.gpu.step_counts import EIGHT_B, decode_steps, handoff
from tests.gpu.triton_counts import SHAPE, SPARSE, mixed_steps

TOKENS, CHUNK = 256, 128
LAYERS = len(EIGHT_B)

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (the extra `gpu`)")


def test_a_decode_step_is_launched_without_a_wait_and_read_behind_the_next() -> None:
    launching, reading = decode_steps(5)
    assert {counted.what for counted in launching} == {"copy", "launch"}
    assert [(counted.what, count) for counted, count in reading.items()] == [("wait: event", 5)]


@needs_triton
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("shape", "more"), [(SHAPE, 0), (SPARSE, 5)], ids=["dense", "mixtures"])
def test_a_step_with_a_prompt_is_one_replay_instead_of_a_launch_for_each_operation(
    graphs: bool, shape: ModelSpec, more: int
) -> None:
    """A mixture takes five launches more than an MLP, and no wait: neither counts nor experts come to the host."""
    counts = mixed_steps(3, graphs=graphs, shape=shape)
    least, most = (2, 14) if graphs else ((11 + more) * LAYERS, (12 + more) * LAYERS)
    found = {counted.what: count / 3 for counted, count in counts.items()}
    assert least <= found.pop("launch") + found.pop("replay", 0.0) <= most
    assert found == {"copy": 1, "wait: copy": 1, "wait: event": 1}, "the batch there, the tokens back, and the end"


@needs_triton
def test_a_handoff_waits_once_a_chunk_and_never_for_what_is_computed() -> None:
    counts, link = handoff(TOKENS, CHUNK)
    found = {(counted.what, counted.stream, counted.thread): count for counted, count in counts.items()}
    assert link.bytes == TOKENS * sum(layer.token_bytes for layer in EIGHT_B)
    assert not any(stream == DEFAULT for _, stream, _ in found)
    assert {thread for _, _, thread in found} == {"copying"}, "neither the event loop nor the engine waits"
    tables = 2  # of the planes' addresses and of the digest's constants, once
    assert found == {
        ("launch", "kv-out", "copying"): 2 * link.chunks,  # packing, and digesting
        ("copy", "kv-out", "copying"): 2 * link.chunks + tables,
        ("wait: event", "kv-out", "copying"): link.chunks + tables,
    }
