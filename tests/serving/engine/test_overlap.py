"""Steps begun ahead of the last one's tokens: when they are, when they are not, and what becomes of who ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import TRIAL_STEPS
from kvcache.blocks.manager import KVCacheManager
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine, engine_for
from serving.engine.plan import StepPlan, StepRecord, Work
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import InternalError, Preempted
from serving.messages import FinishReason
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv, next_token, written_out
from tests.serving.engine.scripted_overlap import LateRunner, make_ahead_engine


class Mixed:
    """A mixed worker's engine that runs ahead; sequences are decoding after `add`."""

    def __init__(self, kv: KVCacheManager | None = None, *, drafts: int = 0, **budgets: int):
        self.kv = kv or make_kv(30, 4)
        self.decode = make_decoding(self.kv, drafts=drafts)
        self.prefill = PrefillScheduler(self.kv, then=self.decode.add)
        self.engine: OverlapEngine
        self.runner: LateRunner
        self.engine, self.runner = make_ahead_engine(self.kv, [self.decode, self.prefill], **budgets)

    def handed_over(self, prompt: Sequence[int], **fields: Any) -> SequenceState:
        """A sequence whose prompt was computed elsewhere joins the batch."""
        seq = make_sequence(self.kv, prompt, stays=True, **fields)
        self.kv.open(seq)
        self.runner.attend(seq.prefix.root, seq.blocks, seq.tokens, seq.computed)
        seq.computed = len(seq.tokens)
        self.kv.publish(seq)
        seq.tokens.append(next_token(seq.tokens))
        self.decode.add(seq)
        return seq

    def queued(self, prompt: Sequence[int], **fields: Any) -> SequenceState:
        seq = make_sequence(self.kv, prompt, stays=True, **fields)
        self.prefill.add(seq)
        return seq

    def step(self) -> list[SequenceOutput]:
        outputs = self.engine.step()
        assert outputs is not None
        return outputs

    def drain(self) -> list[SequenceOutput]:
        """Everything that comes out until there is nothing to do."""
        found: list[SequenceOutput] = []
        while (outputs := self.engine.step()) is not None:
            found += outputs
        return found


@pytest.fixture
def mixed() -> Mixed:
    return Mixed()


def texts(outputs: Sequence[SequenceOutput]) -> dict[str, list[int]]:
    """The tokens of each request, which must come without a gap."""
    found: dict[str, list[int]] = {}
    for output in outputs:
        assert output.delta is not None
        tokens = found.setdefault(output.seq.request.request_id, [])
        assert output.delta.index == len(tokens) + 1, "the first token was drawn elsewhere"
        tokens += output.delta.tokens
    return found


def test_the_next_step_begins_before_the_tokens_of_this_one_are_read(mixed: Mixed) -> None:
    mixed.handed_over([1, 2, 3], max_tokens=5)
    outputs = mixed.drain()
    assert texts(outputs) == {"r": written_out([1, 2, 3], 5)[1:]}
    begun = [("launch", 0)]
    for number in range(1, 4):
        begun += [("launch", number), ("collect", number - 1)]
    assert mixed.runner.events == [*begun, ("collect", 3)]
    assert mixed.engine.ahead == 3 and mixed.kv.allocator.held == 0


def test_every_call_brings_out_one_step(mixed: Mixed) -> None:
    mixed.handed_over([1], max_tokens=4)
    assert [len(mixed.step()) for _ in range(3)] == [1, 1, 1]
    assert mixed.engine.step() is None and mixed.engine.flying == []


def test_a_last_token_is_not_followed(mixed: Mixed) -> None:
    mixed.handed_over([1], request_id="short", max_tokens=3)
    mixed.handed_over([2], request_id="long", max_tokens=5)
    outputs = mixed.drain()
    assert mixed.runner.counts == [[1, 1], [1, 1], [1], [1]]
    assert texts(outputs) == {"short": written_out([1], 3)[1:], "long": written_out([2], 5)[1:]}


def test_nor_is_the_last_of_the_context() -> None:
    mixed = Mixed(make_kv(2, 4))
    mixed.handed_over([1, 2, 3, 4], max_tokens=99)
    outputs = mixed.drain()
    assert texts(outputs) == {"r": written_out([1, 2, 3, 4], 4)[1:]} and len(mixed.runner.counts) == 3


def test_what_is_drawn_for_a_sequence_that_has_stopped_is_dropped(mixed: Mixed) -> None:
    text = written_out([3, 1], 6)
    stop = next(token for token in text[1:] if token != text[0])
    seq = mixed.handed_over([3, 1], stop_token_ids=(stop,), max_tokens=6)
    length = text.index(stop)
    outputs = [output for _ in range(length) for output in mixed.step()]
    assert outputs[-1].delta is not None and outputs[-1].delta.finish is FinishReason.STOP
    assert seq.ended and seq.blocks and mixed.engine.flying == [seq], "a step still writes into its blocks"
    published = seq.prefix.published
    assert mixed.step() == []
    assert seq.tokens[2:] == text[: length + 1] and seq.blocks == [] and mixed.kv.allocator.held == 0
    assert published * 4 <= 2 + length and mixed.engine.step() is None


def test_a_sequence_cancelled_while_two_steps_run_keeps_its_blocks_through_both(mixed: Mixed) -> None:
    seq, other = mixed.handed_over([1], request_id="gone"), mixed.handed_over([2], request_id="stays", max_tokens=6)
    mixed.step()
    seen = []

    def hang_up(work: Sequence[Work]) -> None:
        mixed.engine.end(seq)
        seen.append((seq.in_flight, bool(seq.blocks)))

    mixed.runner.during = hang_up
    mixed.step()
    mixed.runner.during = lambda work: None
    assert (2, True) in seen and seq.in_flight == 1 and seq.blocks
    mixed.step()
    assert seq.in_flight == 0 and seq.blocks == [] and mixed.kv.unaccounted([other]) == 0


def test_a_row_that_cannot_be_sampled_ends_its_sequence_alone(mixed: Mixed) -> None:
    broken, well = mixed.handed_over([1], request_id="broken"), mixed.handed_over([2], request_id="well", max_tokens=4)
    mixed.runner.broken = {"broken"}
    outputs = mixed.drain()
    assert [output.seq for output in outputs] == [broken, well, well, well]
    assert isinstance(outputs[0].error, InternalError) and mixed.kv.allocator.held == 0


def test_who_joins_meanwhile_is_part_of_the_next_step_begun_ahead(mixed: Mixed) -> None:
    mixed.handed_over([1], request_id="first", max_tokens=5)
    outputs = mixed.step()
    mixed.handed_over([2, 2], request_id="second", max_tokens=5)
    outputs += mixed.drain()
    assert mixed.runner.counts == [[1], [1], [1, 1], [1, 1], [1], [1]] and mixed.engine.ahead == 5
    assert texts(outputs)["second"] == written_out([2, 2], 5)[1:]


def test_a_prompt_waits_for_no_more_than_the_step_that_was_begun(mixed: Mixed) -> None:
    mixed.handed_over([1], request_id="old", max_tokens=20)
    for _ in range(3):
        mixed.step()
    mixed.queued([2, 3, 4], request_id="new", max_tokens=4)
    assert mixed.engine.flight is not None
    mixed.step()
    assert mixed.engine.flight is None
    outputs = mixed.step()
    assert mixed.runner.counts[-1] == [1, 3]
    assert [output.seq.request.request_id for output in outputs if output.prefilled] == ["new"]


@pytest.mark.parametrize("lacking", ["blocks", "seats", "tokens"])
def test_a_prompt_that_could_not_run_delays_nobody(lacking: str) -> None:
    budgets = {"seats": {"seqs": 1}, "tokens": {"tokens": 1}, "blocks": {}}[lacking]
    mixed = Mixed(make_kv(6, 4), **budgets)
    mixed.handed_over([1] * 9, request_id="old", max_tokens=9)
    mixed.queued([2] * 13, request_id="new", max_tokens=3)
    for _ in range(6):
        mixed.step()
    assert mixed.engine.ahead == 6
    mixed.drain()
    assert mixed.kv.allocator.held == 0 and mixed.runner.counts[-1] == [1]


def test_a_sequence_that_does_not_overlap_makes_every_step_wait(mixed: Mixed) -> None:
    mixed.handed_over([1], request_id="plain", max_tokens=9)
    mixed.step()
    mixed.runner.opaque = {"opaque"}
    mixed.handed_over([2], request_id="opaque", max_tokens=4)
    mixed.step()
    assert mixed.engine.flight is None
    outputs = [output for _ in range(3) for output in mixed.step()]
    assert mixed.engine.ahead == 1 and len(outputs) == 6
    mixed.step()
    assert mixed.engine.flight is not None, "it has gone"


@pytest.mark.parametrize("what", ["handoff", "offload", "stays"])
def test_work_with_strings_attached_is_not_plain(mixed: Mixed, what: str) -> None:
    seq = mixed.handed_over([1])
    work = Work(seq, 1, mixed.decode)
    assert work.decodes_one
    setattr(seq.prefill if what == "handoff" else seq, what, object() if what != "stays" else False)
    assert not work.decodes_one


def test_a_prompts_last_token_is_not_plain_and_drafts_are_not(mixed: Mixed) -> None:
    seq = make_sequence(mixed.kv, [1])
    assert not Work(seq, 1, mixed.decode).decodes_one
    assert not Work(mixed.handed_over([1]), 2, mixed.decode, draft=(3,)).decodes_one


def test_without_room_for_the_unknown_token_nothing_is_begun_and_nobody_gives_way_early() -> None:
    mixed = Mixed(make_kv(4, 2), max_model_len=99)
    old = mixed.handed_over([1, 1], request_id="old", max_tokens=6)
    young = mixed.handed_over([2, 2], request_id="young", max_tokens=6)
    outputs = mixed.step()
    assert mixed.engine.flight is not None and len(outputs) == 2
    outputs = mixed.step()
    assert mixed.engine.flight is None and len(outputs) == 2 and not young.ended
    assert len(old.tokens) == len(young.tokens) == 5 and old.held_blocks + young.held_blocks <= 4
    outputs = mixed.step()
    assert [output.seq for output in outputs if isinstance(output.error, Preempted)] == [young]
    assert mixed.kv.unaccounted([old]) == 0
    mixed.drain()
    assert old.tokens == [1, 1, *written_out([1, 1], 6)]


def test_steps_that_overlap_are_timed_from_end_to_end(mixed: Mixed) -> None:
    now = [100.0]
    mixed.engine.clock = lambda: now[0]
    hidden = []

    class Slow(PrefillScheduler):
        def measured(self, record: StepRecord) -> None:
            hidden.append((record.began, record.step_seconds, record.hidden_seconds, record.schedule_seconds))

        def fill_ahead(self, plan: StepPlan, at: float) -> bool:
            now[0] += 0.25  # planning ahead, beside the device
            return True

    mixed.engine.schedulers.append(Slow(mixed.kv))
    stalled = []

    def compute(work: Sequence[Work]) -> None:
        now[0] += 1.0
        stalled.append(mixed.engine.stalled_seconds)

    mixed.handed_over([1], max_tokens=4)
    mixed.runner.during = compute
    mixed.drain()
    totals = mixed.engine.totals
    assert totals.steps == 3 and totals.step_seconds == pytest.approx(now[0] - 100.0)
    assert [began for began, *_ in hidden] == pytest.approx([100.0, *(b + s for b, s, *_ in hidden[:-1])])
    assert [(later, schedule) for *_, later, schedule in hidden] == [(0.0, 0.0), (0.25, 0.0), (0.25, 0.0)]
    assert max(stalled) <= 3.25 and mixed.engine.stalled_seconds == 0.0


def test_an_error_on_the_device_is_the_engines(mixed: Mixed) -> None:
    mixed.handed_over([1])
    mixed.step()

    def fail(work: Sequence[Work]) -> None:
        raise RuntimeError("the device is gone")

    mixed.runner.during = fail
    with pytest.raises(RuntimeError, match="device is gone"):
        mixed.engine.step()


@settings(max_examples=100)
@given(at=st.integers(0, 40), lasting=st.booleans(), others=st.integers(0, 3), stops=st.integers(2, 9))
def test_a_request_that_breaks_steps_begun_ahead_fails_alone(at: int, lasting: bool, others: int, stops: int) -> None:
    """From its call number `at` on the runner raises over one request, when a step begins, is read, or is repeated."""
    mixed = Mixed()
    prompts = [[5 + i, 6, 7] for i in range(others)]
    for i, prompt in enumerate(prompts):
        mixed.handed_over(prompt, request_id=f"r{i}", max_tokens=stops + i)
    poison = mixed.handed_over([1, 2], request_id="poison", max_tokens=7)
    calls = count()

    def breaks(work: Sequence[Work]) -> None:
        number = next(calls)
        if any(item.seq is poison for item in work) and (number >= at if lasting else number == at):
            raise IndexError("a mistake over one request")

    mixed.runner.during = breaks
    outputs = mixed.drain()
    failed = [output for output in outputs if output.error is not None]
    told = texts([output for output in outputs if output.error is None])
    assert {f"r{i}": told[f"r{i}"] for i in range(others)} == {
        f"r{i}": written_out(prompt, stops + i)[1:] for i, prompt in enumerate(prompts)
    }
    whole = written_out([1, 2], 7)[1:]
    assert told.get("poison", []) == whole[: len(told.get("poison", []))]
    assert (len(failed) == 1) == (told.get("poison", []) != whole)
    assert lasting or not failed, "what raises once is repeated"
    assert mixed.kv.allocator.held == 0 and mixed.engine.flying == []


def test_settling_brings_out_what_was_begun(mixed: Mixed) -> None:
    seq = mixed.handed_over([1], max_tokens=9)
    mixed.step()
    outputs = mixed.engine.settle()
    assert [output.seq for output in outputs] == [seq] and mixed.engine.settle() == []
    assert seq.in_flight == 0 and mixed.engine.stalled_seconds == 0.0 and mixed.engine.flying == []
    assert [kind for kind, _ in mixed.runner.events].count("launch") == 2, "and begins nothing more"


def test_steps_draft_or_begin_ahead() -> None:
    """Drafting is tried first; here it is never measured against anything, so that afterwards steps begin ahead."""
    mixed = Mixed(make_kv(60, 4), drafts=3)
    mixed.handed_over([1, 2, 1, 2, 1, 2], max_tokens=200)
    for _ in range(TRIAL_STEPS):
        assert mixed.engine.flight is None
        mixed.step()
    assert any(counts[0] > 1 for counts in mixed.runner.counts), "a text of five tokens repeats itself"
    assert mixed.engine.ahead == 0
    begun = len(mixed.runner.counts)
    for _ in range(10):
        mixed.step()
    assert mixed.engine.ahead == 10 and all(counts == [1] for counts in mixed.runner.counts[begun:])


@pytest.mark.parametrize(("device", "kind"), [("cuda", OverlapEngine), ("cuda:1", OverlapEngine), ("cpu", Engine)])
def test_steps_begin_ahead_where_the_device_computes_beside_python(device: str, kind: type[Engine]) -> None:
    assert engine_for(device) is kind
