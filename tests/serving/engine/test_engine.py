"""The engine's step: schedule, run, postprocess, with sequences that end in every way and at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcache.blocks.manager import KVCacheManager
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine
from serving.engine.plan import Work
from serving.engine.sequence import SequenceState
from serving.errors import InternalError, Preempted
from serving.messages import FinishReason
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv, next_token, written_out


class Mixed:
    """A mixed worker's engine; `add` does what a lease of its own does."""

    def __init__(self, kv: KVCacheManager, **budgets: int):
        self.kv = kv
        self.decode = make_decoding(kv)
        self.prefill = PrefillScheduler(kv, then=self.decode.add)
        self.engine: Engine
        self.runner: ScriptedRunner
        self.engine, self.runner = make_engine(kv, [self.decode, self.prefill], **budgets)

    def add(self, prompt: Sequence[int], **fields: Any) -> SequenceState:
        seq = make_sequence(self.kv, prompt, stays=True, **fields)
        self.kv.open(seq)
        self.prefill.add(seq)
        return seq


@pytest.fixture
def mixed() -> Mixed:
    return Mixed(make_kv(20, 4))


def test_a_sequence_goes_from_prompt_to_its_last_token(mixed: Mixed) -> None:
    seq = mixed.add(range(20), max_tokens=5)
    tokens: list[int] = []
    firsts = []
    while (outputs := mixed.engine.step()) is not None:
        for output in outputs:
            assert output.delta is not None and output.delta.index == len(tokens)
            tokens += output.delta.tokens
            firsts.append(output.prefilled)
            finish = output.delta.finish
    assert tokens == written_out(range(20), 5) and finish is FinishReason.LENGTH
    assert firsts == [True, False, False, False, False], "only the first token is the prefill's"
    assert mixed.runner.counts == [[8], [8], [4], [1], [1], [1], [1]]
    assert seq.ended and mixed.kv.allocator.held == 0


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_tokens_after_the_second_are_told_together(mixed: Mixed, every: int) -> None:
    mixed.engine.tell_every = every
    mixed.add(range(8), max_tokens=9)
    told: list[tuple[int, ...]] = []
    steps = 0
    while (outputs := mixed.engine.step()) is not None:
        for delta in [output.delta for output in outputs]:
            assert delta is not None and delta.index == sum(map(len, told))
            told.append(delta.tokens)
            steps += delta.steps
    assert [token for tokens in told for token in tokens] == written_out(range(8), 9) and steps == 9
    apart = [1, 1, *[every] * (7 // every), *([7 % every] if 7 % every else [])]
    assert [len(tokens) for tokens in told] == apart


def test_what_is_not_told_yet_can_be_asked_for(mixed: Mixed) -> None:
    mixed.engine.tell_every = 100
    seq = mixed.add(range(8), max_tokens=9)
    for _ in range(5):
        mixed.engine.step()
    assert len(seq.output) == 5
    asked = [seq.untold(but=1), seq.untold(but=1), seq.untold(), seq.untold()]
    text = tuple(written_out(range(8), 9))
    assert [delta and (delta.index, delta.tokens, delta.steps) for delta in asked] == [
        (2, text[2:4], 2),
        None,
        (4, text[4:5], 1),
        None,
    ]


def test_decode_goes_first_and_prompts_take_the_rest(mixed: Mixed) -> None:
    mixed.add([1, 2], max_tokens=9)
    mixed.engine.step()
    mixed.add(range(20), max_tokens=9)
    mixed.engine.step()
    assert mixed.runner.counts[-1] == [1, 7]


def test_an_idle_engine_says_so(mixed: Mixed) -> None:
    assert mixed.engine.step() is None
    assert mixed.runner.counts == []


def test_a_sequence_ended_while_the_model_runs_keeps_its_blocks_until_the_step_is_over(mixed: Mixed) -> None:
    seq = mixed.add(range(6))

    def hang_up(work: Sequence[Work]) -> None:
        mixed.engine.end(seq)
        assert seq.blocks and mixed.kv.allocator.held == 2, "the model is writing into them"
        assert mixed.engine.flying == [seq]

    mixed.runner.during = hang_up
    assert mixed.engine.step() == []
    assert seq.blocks == [] and mixed.kv.allocator.held == 0 and not seq.in_flight
    assert mixed.engine.step() is None


def test_a_sequence_ended_between_steps_is_gone_at_once(mixed: Mixed) -> None:
    seq = mixed.add(range(20))
    mixed.engine.step()
    mixed.engine.end(seq)
    assert mixed.kv.allocator.held == 0
    mixed.engine.end(seq)
    assert mixed.engine.step() is None


def test_its_computed_blocks_can_be_reused_by_the_next(mixed: Mixed) -> None:
    mixed.engine.end(first := mixed.add(range(16)))
    mixed.engine.step()
    assert first.cached == 0
    seq = mixed.add(range(16))
    mixed.engine.step()
    mixed.engine.end(seq)
    assert mixed.add(range(16)).cached == 8, "what one step of eight tokens computed"


def test_a_row_that_cannot_be_sampled_ends_that_sequence_alone(mixed: Mixed) -> None:
    broken, well = mixed.add([1], request_id="broken"), mixed.add([2], request_id="well")
    mixed.runner.broken = {"broken"}
    outputs = mixed.engine.step()
    assert outputs is not None
    assert [output.seq for output in outputs] == [broken, well]
    assert isinstance(outputs[0].error, InternalError) and outputs[0].prefilled
    assert outputs[1].delta is not None
    assert broken.blocks == [] and mixed.decode.running == [well]


def test_a_stop_token_ends_a_sequence_with_its_first_token() -> None:
    mixed = Mixed(make_kv(20, 4))
    seq = mixed.add([1, 2, 3], stop_token_ids=(next_token([1, 2, 3]),))
    outputs = mixed.engine.step()
    assert outputs is not None and outputs[0].delta is not None
    assert outputs[0].delta.finish is FinishReason.STOP and outputs[0].prefilled
    assert seq.ended and mixed.kv.allocator.held == 0 and mixed.decode.running == []


def test_a_preempted_sequence_comes_out_as_an_error_once() -> None:
    mixed = Mixed(make_kv(4, 2), max_model_len=99)
    old, young = mixed.add([0, 1, 0], max_tokens=9), mixed.add([1, 1, 1], max_tokens=9)
    errors: list[SequenceState] = []
    for _ in range(4):
        for output in mixed.engine.step() or []:
            if output.error is not None:
                assert isinstance(output.error, Preempted) and output.seq.ended and not output.prefilled
                errors.append(output.seq)
    assert errors == [young] and not old.ended
    assert mixed.kv.unaccounted([old]) == 0


def test_a_step_with_nothing_but_a_preemption_still_reports_it() -> None:
    mixed = Mixed(make_kv(2, 2), max_model_len=99)
    seq = mixed.add([0, 1, 0], max_tokens=9)
    mixed.engine.step()
    mixed.engine.step()
    outputs = mixed.engine.step()
    assert outputs is not None and [output.seq for output in outputs] == [seq]
    assert mixed.engine.step() is None


def test_layers_are_told_only_of_sequences_that_are_handed_over(mixed: Mixed) -> None:
    heard: list[tuple[list[SequenceState], int]] = []

    def layer_done(work: Sequence[Work], layer: int) -> None:
        heard.append(([item.seq for item in work], layer))

    mixed.add([1])
    mixed.engine.step(layer_done)
    assert heard == []
    passing = make_sequence(mixed.kv, [2])
    passing.prefill.handoff = object()  # type: ignore[assignment]
    mixed.prefill.add(passing)
    mixed.engine.step(layer_done)
    assert heard == [([passing], 0), ([passing], 1)]


def test_a_step_is_timed_and_counted() -> None:
    mixed = Mixed(make_kv(20, 4))
    now = [10.0]
    mixed.engine.clock = lambda: now[0]
    mixed.add(range(5))
    stalled = []

    def compute(work: Sequence[Work]) -> None:
        now[0] += 2.0
        stalled.append(mixed.engine.stalled_seconds)

    mixed.runner.during = compute
    mixed.engine.step()
    totals = mixed.engine.totals
    assert stalled == [2.0] and mixed.engine.stalled_seconds == 0.0
    assert (totals.steps, totals.tokens, totals.step_seconds) == (1, 5, 2.0)
