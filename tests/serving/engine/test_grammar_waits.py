"""A sequence whose grammar is being compiled waits beside the steps of the others, and goes on by itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from prefill.scheduler import PrefillScheduler
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.grammar.grammars import CompiledGrammar, GrammarState
from tests.decode.test_scheduler import handed_over
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv


def compiling(seq: SequenceState) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    seq.grammar = GrammarState(future)
    return future


def planned(scheduler: Any, tokens: int = 99, *, ahead: bool = False) -> list[SequenceState]:
    plan = StepPlan(tokens, 9, ahead=ahead)
    scheduler.fill_ahead(plan, 0.0) if ahead else scheduler.fill(plan, 0.0)
    return [work.seq for work in plan.work]


def test_others_decode_meanwhile() -> None:
    kv = make_kv(20, 4)
    scheduler = make_decoding(kv)
    waits, free = (handed_over(kv, None, make_sequence(kv, [n] * 3)) for n in range(2))
    compiled = compiling(waits)
    scheduler.add(waits)
    scheduler.add(free)
    assert planned(scheduler) == [free] == planned(scheduler, ahead=True)
    compiled.set_exception(RuntimeError("whatever becomes of it"))
    assert planned(scheduler) == [waits, free]


def test_others_prompts_are_computed_meanwhile() -> None:
    kv = make_kv(20, 4)
    scheduler = PrefillScheduler(kv)
    waits, free = make_sequence(kv, [0] * 6), make_sequence(kv, [1] * 6)
    compiled = compiling(waits)
    scheduler.add(waits)
    assert planned(scheduler) == [] and not waits.blocks
    assert scheduler.fill_ahead(StepPlan(99, 9, ahead=True), 0.0)  # no step waits for it
    scheduler.add(free)
    assert planned(scheduler) == [free]
    compiled.set_exception(RuntimeError("whatever becomes of it"))
    assert planned(scheduler) == [waits, free]


def test_a_prompt_is_computed_up_to_its_last_chunk() -> None:
    kv = make_kv(20, 4)
    scheduler = PrefillScheduler(kv)
    seq = make_sequence(kv, [0] * 12)
    compiling(seq)
    scheduler.add(seq)
    assert planned(scheduler, 8) == [seq]
    seq.computed = 8
    assert planned(scheduler, 8) == []


def test_whoever_waits_is_told() -> None:
    told: list[str] = []
    seq = make_sequence(None, [0])
    compiled = compiling(seq)
    assert seq.grammar is not None and not seq.may_draw
    seq.grammar.when_ready(lambda: told.append("ready"))
    assert not told
    compiled.set_exception(RuntimeError("whatever becomes of it"))
    assert told == ["ready"] and seq.may_draw


def test_no_token_is_drafted_that_may_not_come() -> None:
    class Allowing(GrammarState):
        def possible(self, output: Sequence[int], draft: Sequence[int]) -> int:
            return 1

    kv = make_kv(20, 16)
    scheduler = make_decoding(kv, drafts=4)
    free, held = (handed_over(kv, None, make_sequence(kv, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5])) for _ in range(2))
    compiled: Future[CompiledGrammar] = Future()
    compiled.set_exception(RuntimeError("not asked for"))
    held.grammar = Allowing(compiled)
    for seq in (free, held):
        seq.tokens[-1] = 1
        scheduler.add(seq)
    plan = StepPlan(99, 9)
    scheduler.fill(plan, 0.0)
    assert [work.draft for work in plan.work] == [(2, 3, 4, 5), (2,)]
