"""A step that raises: whose request breaks it ends with an error, and the others' tokens are what they ever are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.blame import PLAIN, run_step
from serving.engine.plan import Work
from serving.engine.pooling import pool, pooled_rows
from serving.engine.run import LayerDone, RunResult, RunTimes
from serving.errors import MISTAKES, InternalError
from serving.messages import Pooling
from serving.sampling.sampler import Sampled, SamplingFailed
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import written_out
from tests.serving.engine.test_engine_loop import Loop


class Poisonous:
    """Raises when a step holds a prompt of `poison`; else draws the prompt's token, and tells of two layers first."""

    def __init__(self, poison: Sequence[int], mistake: type[Exception] = ValueError, *, after: int = 2) -> None:
        self.poison = set(poison)
        self.mistake = mistake
        self.after = after  # layers
        self.broken = False
        self.plain = list[list[int]]()  # blocks of sequences that are nobody's

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        self.plain += [item.seq.blocks for item in work if item.seq.request is PLAIN]
        for layer in range(self.after):
            if layer_done is not None:
                layer_done(work, layer)
        if self.broken or self.poison & {number(item) for item in work}:
            raise self.mistake("a mistake over one request")
        for layer in range(self.after, 2):
            if layer_done is not None:
                layer_done(work, layer)
        drawn: list[list[Sampled | SamplingFailed]] = [[Sampled(number(item))] for item in work]
        times = RunTimes(1.0, 1.0, 1.0)
        return RunResult(drawn, {i: [] for i in range(len(work))}, times, dict.fromkeys(range(len(work)), b"x"))


def item(number: int) -> Work:
    """A step's work on the prompt of this token, in blocks of which the last is named after it."""
    seq = make_sequence(None, [number])
    seq.blocks = [99, 100 + number]
    return Work(seq, 1, None)  # type: ignore[arg-type]


def number(work: Work) -> int:
    """The prompt's token; -1 for a sequence that is nobody's."""
    return -1 if work.seq.request is PLAIN else work.seq.tokens[0]


@settings(max_examples=60)
@given(count=st.integers(1, 6), poison=st.sets(st.integers(0, 5)), after=st.integers(0, 2), data=st.data())
def test_only_what_breaks_a_step_fails_and_no_layer_is_told_of_twice(
    count: int, poison: set[int], after: int, data: st.DataObject
) -> None:
    told: list[tuple[int, int]] = []

    def tell(work: Sequence[Work], layer: int) -> None:
        told.extend((number(one), layer) for one in work)

    runner = Poisonous(sorted(poison), data.draw(st.sampled_from(MISTAKES)), after=after)
    result = run_step(runner, [item(number) for number in range(count)], tell)
    failed = [number for number, (draw,) in enumerate(result.drawn) if isinstance(draw, SamplingFailed)]
    assert failed == sorted(poison & set(range(count)))
    assert all(draw == Sampled(number) for number, (draw,) in enumerate(result.drawn) if number not in failed)
    assert len(told) == len(set(told))
    assert {number for number, layer in told if layer == 1} >= set(range(count)) - set(failed)
    assert set(result.embeddings) == set(range(count)) - set(failed)
    assert runner.plain == ([[100]] if len(failed) == count else [])


class Embedding(Poisonous):
    """Computes the embeddings' chunks first, as batches of their own, and raises over the others afterwards."""

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        wanted = [i for i, one in enumerate(work) if one.seq.request.pooling is not None]
        chunks = [work[i] for i in wanted]
        rows = pooled_rows(chunks)
        hidden = torch.tensor([[float(token)] for one in chunks for token in one.tokens])
        found = pool(chunks, rows, hidden[[row for span in rows for row in span]]) if chunks else {}
        result = super().run(work, layer_done)
        embeddings = {wanted[i]: embedding for i, embedding in found.items()}
        return RunResult(result.drawn, {}, result.times, embeddings)


@pytest.mark.parametrize("pooling", list(Pooling))
@given(cuts=st.sets(st.integers(1, 7)), poisoned=st.sets(st.integers(0, 7)))
def test_an_embedding_beside_a_step_that_is_repeated_is_what_it_is_alone(
    pooling: Pooling, cuts: set[int], poisoned: set[int]
) -> None:
    """Before: the chunk was added twice, or all before the last were lost, and the answer was a success."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]

    def embedding(poisoned: set[int]) -> bytes | SamplingFailed:
        seq, runner = make_sequence(None, prompt, pooling=pooling), Embedding([0])
        edges = [0, *sorted(cuts), len(prompt)]
        for step, (start, end) in enumerate(pairwise(edges)):
            seq.computed = start
            work = [Work(seq, end - start, None), *([item(0)] if step in poisoned else [])]  # type: ignore[arg-type]
            result = run_step(runner, work, None)
        return result.embeddings[0]

    assert embedding(poisoned) == embedding(set())


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_computes_not_even_a_plain_token_is_broken_itself(count: int) -> None:
    runner = Poisonous([])
    runner.broken = True
    with pytest.raises(ValueError, match="mistake"):
        run_step(runner, [item(number) for number in range(count)], None)
    assert runner.plain == [[100]]


@pytest.mark.parametrize("mistake", [MemoryError, OSError, KeyboardInterrupt])
def test_what_no_request_is_to_blame_for_goes_through(mistake: type[Exception]) -> None:
    with pytest.raises(mistake):
        run_step(Poisonous([1], mistake), [item(0), item(1)], None)


async def test_others_go_on_in_the_engine_and_nothing_is_held() -> None:
    made, raised = Loop(), list[BaseException]()

    def breaks(work: Sequence[Work]) -> None:
        if any(item.seq is poison for item in work):
            raise IndexError("a mistake over one request")

    hook, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_value)
    try:
        made.start()
        with made.engine.lock:
            prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
            added = [made.add(prompt, max_tokens=8) for prompt in prompts]
            poison, bad = made.add([2, 2], max_tokens=8)
            errors = list[object]()
            deliver = bad.deliver
            bad.deliver = lambda output: (errors.append(output.error), deliver(output))[1]  # type: ignore[method-assign]
            made.runner.during = breaks
        async with asyncio.timeout(60):
            for _, inbox in [*added, (poison, bad)]:
                await inbox.ended.wait()
        await made.loop.stop()
    finally:
        threading.excepthook = hook
    assert not made.loop.crashed and not raised
    assert [inbox.tokens for _, inbox in added] == [written_out(prompt, 8) for prompt in prompts]
    assert bad.tokens == [] and [type(error) for error in errors] == [InternalError]
    assert made.kv.allocator.held == 0
