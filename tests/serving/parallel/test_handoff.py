"""A prompt that one layout has computed is decoded by another, whose KV went through the codec, to the same text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from kvcache.handoff.chunk import Chunk, encode, join, split, verify
from kvcache.memory.device import DeviceKV
from kvcache.memory.kv_pieces import kv_pieces
from serving.loader.loading import load
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout
from tests.fakes.sequences import lease_id
from tests.serving.expert_parallel.served import NEW_TOKENS, greedy
from tests.serving.parallel.groups import Threads
from tests.serving.parallel.models import written
from tests.serving.parallel.workers import ParallelWorker

PROMPT = [3, 17, 5, 60, 22, 41, 9, 77, 13, 2, 58]
TABLES = {"prefill": [4, 1, 5, 0, 2], "decode": [2, 5, 3, 1, 4]}
ONE, TP2, SP2 = ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(sequence=2)
CASES = [
    ("llama3", TP2, ONE, "float32"),
    ("llama3", ONE, TP2, "float32"),
    ("llama3", TP2, ONE, "int8"),
    ("llama3", SP2, ONE, "float32"),
    ("llama3", SP2, TP2, "float32"),
    ("llama3", ONE, ParallelLayout(tensor=4), "float32"),  # each head goes to two ranks
    ("llama3", ParallelLayout(pipeline=2), TP2, "float32"),
    ("llama3", ParallelLayout(pipeline=2), ParallelLayout(pipeline=3), "float32"),
    ("deepseek_v3_plain", SP2, TP2, "float32"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("models"), {name: None for name, *_ in CASES})


def handed_over(spec: ModelSpec, source: ParallelWorker, target: ParallelWorker, tokens: int) -> int:
    """Send the KV of so many tokens piece by piece; how many chunks there were."""
    arrived: dict[tuple[int, int], list[Chunk]] = {}
    for piece in kv_pieces(spec, source.layout, target.layout):
        chunk = encode(
            source.kv[piece.sender],
            lease_id(),
            "layout",
            piece.layers,
            source.table,
            0,
            tokens,
            head_slice=piece.heads,
            first_layer=piece.first_layer,
        )
        arrived.setdefault((piece.receiver, piece.first_layer), []).append(chunk)
    for (receiver, _), chunks in arrived.items():
        write(chunks, target.kv[receiver], target.table)
    return sum(map(len, arrived.values()))


def write(chunks: Iterable[Chunk], kv: DeviceKV, table: list[int]) -> None:
    whole = join(list(chunks), kv.specs)
    verify(whole, kv)
    for layer, parts in enumerate(split(whole, kv), whole.first_layer):
        kv.write(layer, kv.slots(table, whole.start, whole.end), parts)


@pytest.mark.parametrize(("name", "first", "then", "kv_dtype"), CASES, ids=str)
def test_kv_of_one_layout_serves_another(
    folders: dict[str, Path], name: str, first: ParallelLayout, then: ParallelLayout, kv_dtype: str
) -> None:
    whole = load(folders[name], "float32").model
    with Threads(first) as prefilling, Threads(then) as decoding:
        source = ParallelWorker(folders[name], first, prefilling, TABLES["prefill"], kv_dtype)
        target = ParallelWorker(folders[name], then, decoding, TABLES["decode"], kv_dtype)
        text = [source.step(PROMPT, 0)]
        assert handed_over(whole.spec, source, target, len(PROMPT)) >= max(first.ranks, then.ranks)
        while len(text) < NEW_TOKENS:
            text.append(target.step(text[-1:], len(PROMPT) + len(text) - 1))
    if kv_dtype == "float32":
        ((wanted, _),) = greedy(whole, [PROMPT])
    else:
        wanted = alone(folders[name], kv_dtype)
    assert text == wanted


def alone(path: Path, kv_dtype: str) -> list[int]:
    with Threads(ONE) as threads:
        worker = ParallelWorker(path, ONE, threads, TABLES["decode"], kv_dtype)
        text = [worker.step(PROMPT, 0)]
        while len(text) < NEW_TOKENS:
            text.append(worker.step(text[-1:], len(PROMPT) + len(text) - 1))
    return text
