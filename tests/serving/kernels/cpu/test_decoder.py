"""The fused step against plain formulas, and the promise that a token's bits depend on its own sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.formulas import SmallDecoder

KINDS = [(Kind.F32, Kind.F32), (Kind.BF16, Kind.BF16), (Kind.INT8, Kind.BF16), (Kind.INT8, Kind.INT8)]
TOLERANCE = {
    Kind.F32: 2e-4,
    Kind.BF16: 8e-2,
    Kind.INT8: 2.5e-1,
}  # a rounding tie may fall either way in a layer's input
PROMPT = [(13 * i + 5) % 100 for i in range(200)]


def batch_of(sequences: list[tuple[int, list[int]]], *, all_rows: bool = False, width: int = 16) -> RaggedBatch:
    """Each sequence is (start, new tokens), in the `width` blocks that are its own by its place in the list."""
    total = sum(len(new) for _, new in sequences)
    return RaggedBatch.build(
        tokens=[new for _, new in sequences],
        starts=[start for start, _ in sequences],
        block_tables=[list(range(i * width, (i + 1) * width)) for i in range(len(sequences))],
        block_size=16,
        logits_rows=range(total) if all_rows else None,
    )


def logits_of(decoder: cpu.CpuDecoder, batch: RaggedBatch) -> Tensor:
    return decoder.step(batch)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("extra", [{}, {"head_norms": True, "bias": True, "rotary_dim": 16, "windows": (20, 0)}])
def test_logits_equal_the_formulas(kernels: cpu.Kernels, kinds: tuple[Kind, Kind], extra: dict[str, object]) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], **extra)  # type: ignore[arg-type]
    decoder = small.build(kernels)
    expected = small.logits(PROMPT)
    got = logits_of(decoder, batch_of([(0, PROMPT)], all_rows=True))
    error = (got - expected).abs()
    assert error.max() < TOLERANCE[kinds[0]] * expected.std()
    assert error.mean() < 0.1 * TOLERANCE[kinds[0]] * expected.std()


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
def test_bits_do_not_depend_on_how_a_prompt_is_cut(kernels: cpu.Kernels, kinds: tuple[Kind, Kind]) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1])
    decoder = small.build(kernels)
    whole = logits_of(decoder, batch_of([(0, PROMPT)], all_rows=True))
    planes = [plane.clone() for one in small.planes for plane in (one.k, one.v)]
    for cut in ([200], [1] * 5 + [60, 64, 71], [130] + [1] * 70, [3, 197]):
        for one in small.planes:
            one.k.zero_()
            one.v.zero_()
        ends = list(itertools.accumulate(cut))
        starts = [end - count for end, count in zip(ends, cut, strict=True)]
        parts = [
            logits_of(decoder, batch_of([(start, PROMPT[start:end])], all_rows=True))
            for start, end in zip(starts, ends, strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)
        assert all(
            torch.equal(plane, kept)
            for plane, kept in zip((p for one in small.planes for p in (one.k, one.v)), planes, strict=True)
        )


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
def test_a_long_prompt_whose_rows_attend_by_the_hundred_has_the_bits_of_short_ones(
    kernels: cpu.Kernels, kinds: tuple[Kind, Kind]
) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], blocks=40)
    decoder = small.build(kernels)
    prompt = [(7 * i + i // 90) % 100 for i in range(620)]
    ends = [50, 170, 171, 420, 620]
    parts = [
        logits_of(decoder, batch_of([(start, prompt[start:end])], all_rows=True, width=40))
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    planes = [plane.clone() for one in small.planes for plane in (one.k, one.v)]
    for rows in ([619], [0, 130, 170, 171, 255, 256, 400], range(620)):
        for one in small.planes:
            one.k.zero_()
            one.v.zero_()
        whole = RaggedBatch.build(
            tokens=[prompt], starts=[0], block_tables=[list(range(40))], block_size=16, logits_rows=rows
        )
        assert torch.equal(logits_of(decoder, whole), torch.cat(parts)[list(rows)])
        written = [plane for one in small.planes for plane in (one.k, one.v)]
        assert all(torch.equal(plane, kept) for plane, kept in zip(written, planes, strict=True))


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("company", [1, 7, 15, 80])
def test_bits_do_not_depend_on_the_batch(kernels: cpu.Kernels, kinds: tuple[Kind, Kind], company: int) -> None:
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], blocks=16 * 90)
    decoder = small.build(kernels)
    logits_of(decoder, batch_of([(0, PROMPT[:150])]))
    alone = logits_of(decoder, batch_of([(150, [7])]))
    others = [(i, [3 + i % 50] * (1 + 2 * (i % 3))) for i in range(company)]
    beside = logits_of(decoder, batch_of([(150, [7]), *others]))
    assert torch.equal(beside[0], alone[0])


def test_threads_do_not_change_bits() -> None:
    library = cpu.shared_library()
    assert library is not None
    for form in cpu.forms(library):
        results = []
        for threads in (1, 2, 3):
            torch.manual_seed(1)
            kernels = cpu.Kernels(library, threads=threads, form=form)
            small = SmallDecoder(kind=Kind.INT8, kv_kind=Kind.BF16)
            decoder = small.build(kernels)
            steps = [batch_of([(0, PROMPT)]), batch_of([(200, [9])]), batch_of([(201, [1, 2]), (0, [5] * 40)])]
            results.append(torch.cat([logits_of(decoder, batch) for batch in steps]))
            kernels.close()
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_greedy_is_the_first_best_logit(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16)
    small.head.weight[50:].copy_(small.head.weight[:50])
    small.head.weight[1::2].copy_(small.head.weight[::2])  # every logit four times, twice within a panel
    decoder = small.build(kernels)
    batch = batch_of([(0, PROMPT)], all_rows=True)
    logits, tokens = decoder.step(batch), decoder.step(batch, cpu.StepOutput.GREEDY)
    best = logits == logits.amax(dim=-1, keepdim=True)
    assert torch.equal(tokens, torch.where(best, torch.arange(100), 100).amin(dim=-1))
    assert (best.sum(dim=-1) >= 4).all()


def test_what_threads_do_of_others_shares_changes_nothing() -> None:
    """More threads than cores: some have done theirs before others begin, and take panels in no order of tokens."""
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16)
    small.head.weight[50:].copy_(small.head.weight[:50])  # each logit twice, in panels apart
    batch = batch_of([(0, PROMPT[:20])], all_rows=True)
    alone, many = cpu.load(threads=1), cpu.load(threads=8)
    assert alone is not None and many is not None
    expected = logits_of(small.build(alone), batch)
    decoder = small.build(many)
    for _ in range(50):
        assert torch.equal(logits_of(decoder, batch), expected)
        assert torch.equal(decoder.step(batch, cpu.StepOutput.GREEDY), expected[:, :50].argmax(dim=-1))
    alone.close()
    many.close()


@pytest.mark.parametrize("kind", [Kind.INT8, Kind.BF16])
def test_logits_of_some_rows_are_kept_besides_the_best_tokens(kernels: cpu.Kernels, kind: Kind) -> None:
    decoder = SmallDecoder(kind=kind, kv_kind=Kind.BF16).build(kernels)
    batch = batch_of([(0, PROMPT[:60])], all_rows=True)
    logits, tokens = decoder.step(batch), decoder.step(batch, cpu.StepOutput.GREEDY)
    for rows in ([0], [59], [3, 4, 31, 32, 58], range(60)):
        kept = torch.full((len(rows) + 1, decoder.shape.vocab), torch.nan)
        places = dict(zip(rows, kept[:-1], strict=True))
        assert torch.equal(decoder.step(batch, cpu.StepOutput.GREEDY, kept=places), tokens)
        assert torch.equal(kept[:-1], logits[list(rows)]) and kept[-1].isnan().all()


@pytest.mark.parametrize("count", [3, 200], ids=["by panels", "by rows"])
def test_hidden_states_are_what_the_head_takes(kernels: cpu.Kernels, count: int) -> None:
    small = SmallDecoder(kind=Kind.BF16, kv_kind=Kind.BF16)
    decoder = small.build(kernels)
    for all_rows in (True, False):
        batch = batch_of([(0, PROMPT[:count])], all_rows=all_rows)
        hidden = decoder.step(batch, cpu.StepOutput.HIDDEN)
        assert hidden.shape == (count if all_rows else 1, decoder.shape.hidden)
        assert torch.equal(kernels.linear(hidden, decoder.head), decoder.step(batch))


def test_progress(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.F32)
    decoder, progress = small.build(kernels), torch.zeros(1, dtype=torch.int32)
    for count in (10, 200):
        progress.zero_()
        decoder.step(batch_of([(0, PROMPT[:count])]), progress=progress)
        assert progress.item() == small.layers


def test_a_step_without_logits_writes_kv(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.INT8, kv_kind=Kind.BF16)
    decoder = small.build(kernels)
    batch = RaggedBatch.build(tokens=[PROMPT[:20]], starts=[0], block_tables=[[1, 2]], block_size=16, logits_rows=[])
    assert decoder.step(batch).shape == (0, small.vocab)
    assert small.planes[-1].k[1].any()


def test_mistakes_are_named(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.F32, positions=16)
    decoder = small.build(kernels)
    with pytest.raises(ValueError, match="rotary table of 16"):
        decoder.step(batch_of([(10, [1] * 7)]))
    small.planes.pop()
    with pytest.raises(ValueError, match="2 layers of weights and 1"):
        small.build(kernels)


@pytest.mark.parametrize("rows", [range(1281), [0, 1280]], ids=["all", "two"])
def test_more_threads_than_blocks_of_rows_have_the_bits_of_one(rows: Sequence[int]) -> None:
    """Blocks are as many as threads or a multiple: the last ones may begin past the batch, and have no rows."""
    small, found = SmallDecoder(kind=Kind.INT8, kv_kind=Kind.BF16, blocks=82, positions=1296), []
    prompt = [(7 * i + i // 90) % 100 for i in range(1281)]
    batch = RaggedBatch.build(
        tokens=[prompt], starts=[0], block_tables=[list(range(81))], block_size=16, logits_rows=rows
    )
    for threads in (1, 40):
        kernels = cpu.load(threads=threads)
        assert kernels is not None
        found.append(logits_of(small.build(kernels), batch).clone())
        kernels.close()
    assert found[1].isfinite().all() and torch.equal(*found)
