"""The engine's thread and the event loop: outputs arrive once and in order, wakes are not lost, a crash is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import pytest

from prefill.scheduler import PrefillScheduler
from serving.engine import loop
from serving.engine.engine import Engine
from serving.engine.loop import EngineLoop
from serving.engine.plan import Work
from serving.engine.sequence import SequenceOutput, SequenceState
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv, written_out
from tests.serving.engine.scripted_overlap import LateRunner, make_ahead_engine


class Inbox:
    """Gathers a sequence's tokens and says when it has ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.threads: set[int] = set()
        self.ended = asyncio.Event()

    def deliver(self, output: SequenceOutput) -> None:
        self.threads.add(threading.get_ident())
        if output.delta is not None:
            assert output.delta.index == len(self.tokens)
            self.tokens += output.delta.tokens
        if output.delta is None or output.delta.finish is not None:
            self.ended.set()


class Loop:
    """A mixed worker's engine, running in its thread."""

    def __init__(self, *, ahead: bool = False) -> None:
        self.kv = make_kv(40, 4)
        self.decode = make_decoding(self.kv)
        self.prefill = PrefillScheduler(self.kv, then=self.decode.add)
        self.engine: Engine
        self.runner: ScriptedRunner
        make = make_ahead_engine if ahead else make_engine
        self.engine, self.runner = make(self.kv, [self.decode, self.prefill])
        self.crashed = asyncio.Event()
        self.inboxes: dict[SequenceState, Inbox] = {}
        self.steps: list[int] = []  # outputs of each step
        self.loop = EngineLoop(self.engine)

    def start(self) -> None:
        self.loop.start([self], self.crashed.set)

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        self.steps.append(len(outputs))
        for output in outputs:
            self.inboxes[output.seq].deliver(output)

    def add(self, prompt: Sequence[int], max_tokens: int = 6) -> tuple[SequenceState, Inbox]:
        seq = make_sequence(self.kv, prompt, stays=True, max_tokens=max_tokens)
        inbox = self.inboxes[seq] = Inbox()
        with self.engine.lock:
            self.kv.open(seq)
            self.prefill.add(seq)
        self.loop.wake()
        return seq, inbox


@pytest.fixture(params=["one after the other", "ahead"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Loop]:
    made = Loop(ahead=request.param == "ahead")
    made.start()
    yield made
    await made.loop.stop()


async def test_tokens_arrive_on_the_event_loop_in_order(running: Loop) -> None:
    prompts = [[1], [2, 3], list(range(4))]
    inboxes = [running.add(prompt)[1] for prompt in prompts]
    for prompt, inbox in zip(prompts, inboxes, strict=True):
        async with asyncio.timeout(60):
            await inbox.ended.wait()
        assert inbox.tokens == written_out(prompt, 6)
        assert inbox.threads == {threading.get_ident()}
    assert running.kv.allocator.held == 0


async def test_no_wake_is_lost(running: Loop) -> None:
    """Each sequence comes when the engine may just be falling asleep after the one before."""
    for n in range(200):
        _, inbox = running.add([n % 5], max_tokens=2)
        async with asyncio.timeout(60):
            await inbox.ended.wait()


async def test_listeners_are_told_once_a_step_of_all_its_outputs(running: Loop) -> None:
    with running.engine.lock:
        inboxes = [running.add([1, n], max_tokens=3)[1] for n in range(2)]
    for inbox in inboxes:
        await inbox.ended.wait()
    assert running.steps == [2, 2, 2]


async def test_outputs_are_taken_before_the_next_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TAKEN_SECONDS", 60.0)
    made = Loop()
    told: list[int] = []
    made.runner.during = lambda _: told.append(len(made.steps))
    slow = SimpleNamespace(deliver=lambda _: time.sleep(0.02))  # the other thread has Python's lock meanwhile
    made.loop.start([slow, made], made.crashed.set)
    _, inbox = made.add([1], max_tokens=9)
    await inbox.ended.wait()
    await made.loop.stop()
    assert told == list(range(9))


async def test_a_busy_event_loop_keeps_no_step_waiting() -> None:
    made, computed = Loop(), threading.Semaphore(0)
    made.runner.during = lambda _: computed.release()
    made.start()
    _, inbox = made.add([1], max_tokens=20)
    for _ in range(20):
        assert computed.acquire(timeout=10), "the event loop has been here all the time"
    assert len(made.steps) <= 1
    await inbox.ended.wait()
    await made.loop.stop()


async def test_layers_are_told_on_the_event_loop_while_the_model_runs(running: Loop) -> None:
    heard: list[tuple[int, int]] = []
    all_heard = asyncio.Event()
    go_on = threading.Event()

    class Handoff:
        def layer_done(self, layer: int, upto: int) -> None:
            heard.append((layer, upto))
            if layer == 1:
                all_heard.set()

    running.runner.during = lambda work: assert_set(go_on)
    seq = make_sequence(running.kv, [1, 2, 3], max_tokens=9)
    inbox = running.inboxes[seq] = Inbox()
    seq.prefill.handoff = Handoff()
    running.prefill.add(seq)
    running.loop.wake()
    await all_heard.wait()
    assert heard == [(0, 3), (1, 3)] and not inbox.tokens, "the step is not over"
    go_on.set()
    while not inbox.tokens:
        await asyncio.sleep(0)
    running.loop.end(seq)


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


async def test_an_engine_that_dies_says_so() -> None:
    made = Loop()

    def fail(work: Sequence[Work]) -> None:
        raise MemoryError("the device is full")

    made.runner.during = fail
    raised: list[type[BaseException]] = []
    hook, threading.excepthook = threading.excepthook, lambda args: raised.append(args.exc_type)
    try:
        made.start()
        made.add([1])
        await made.crashed.wait()
        await made.loop.stop()
    finally:
        threading.excepthook = hook
    assert made.loop.crashed and raised == [MemoryError]


@pytest.mark.parametrize("breaks", ["outputs", "layers"])
async def test_a_listener_that_breaks_is_a_crash_too_and_no_step_follows(
    breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its sequences would wait for ever, in a worker that says that it is well."""
    made, crashes = Loop(), list[int]()

    def fail(*_: object) -> None:
        raise KeyError("a mistake of ours")

    unhandled: list[str] = []
    running = asyncio.get_running_loop()
    running.set_exception_handler(lambda _, context: unhandled.append(type(context["exception"]).__name__))
    if breaks == "outputs":
        monkeypatch.setattr(made, "deliver", fail)
    made.loop.start([made], lambda: crashes.append(1) or made.crashed.set())
    seq, _ = made.add([1])
    if breaks == "layers":
        made.loop._layer_done([Work(seq, 1, made.prefill)], 0)
        seq.prefill.handoff = SimpleNamespace(layer_done=fail)
    async with asyncio.timeout(60):
        await made.crashed.wait()
        await made.loop.stop()
    await asyncio.sleep(0)
    assert made.loop.crashed and crashes == [1] and set(unhandled) == {"KeyError"}


async def test_stopping_lets_the_step_in_progress_end() -> None:
    made = Loop()
    began, go_on = threading.Event(), threading.Event()

    def compute(work: Sequence[Work]) -> None:
        began.set()
        assert_set(go_on)

    made.runner.during = compute
    made.start()
    made.add([1])
    await asyncio.to_thread(began.wait)
    stopping = asyncio.create_task(made.loop.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert len(made.runner.counts) == 1


async def test_stopping_brings_out_the_step_that_was_begun_ahead() -> None:
    made = Loop(ahead=True)
    runner = made.runner
    assert isinstance(runner, LateRunner)
    began, go_on = threading.Event(), threading.Event()

    def compute(work: Sequence[Work]) -> None:
        if ("launch", 1) in runner.events:  # the second step has been begun, and the first is not collected
            began.set()
            assert_set(go_on)

    runner.during = compute
    made.start()
    seq, inbox = made.add([1], max_tokens=9)
    await asyncio.to_thread(assert_set, began)
    stopping = asyncio.create_task(made.loop.stop())
    await asyncio.sleep(0)
    go_on.set()
    await stopping
    await asyncio.sleep(0)
    assert runner.events[-1] == ("collect", 1) and [kind for kind, _ in runner.events].count("launch") == 2
    assert inbox.tokens == written_out([1], 3) == seq.tokens[1:] and seq.in_flight == 0
