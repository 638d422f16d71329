"""Long bodies are read by processes of their own: to the same plans and errors, in turn, and within a budget."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.datastructures import Headers

from serving.api import body_process
from serving.api.body_process import BodyProcess, Outcome
from serving.api.body_work import LONG_BODY, SMALL_BODY, BodyWork
from serving.api.plan import RequestHead, RequestIds
from serving.api.readers import ReaderSettings
from serving.api.settings import ServedModel
from serving.config import HttpConfig
from serving.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from serving.service_class import SERVICE_CLASSES
from serving.text.tokenizer import Tokenizer
from tests.fakes.stopping import harm, stop

pytestmark = pytest.mark.thorough

BOTH = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[Any, Any, None]], None]
HEAD = RequestHead(ids=RequestIds(shown="a", unique="a"), headers={"x-session-id": "s"})


@asynccontextmanager
async def reading(tokenizer: Tokenizer, budget: int = 10) -> AsyncIterator[BodyWork]:
    settings = ReaderSettings(
        tokenizer=tokenizer,
        served=ServedModel(names=("tiny",), max_model_len=8192, vocab_size=384, created=1),
        config=HttpConfig(api_key="secret"),
        classes=SERVICE_CLASSES,
        default_class="standard",
    )
    work = BodyWork(settings, budget)
    await work.start()
    try:
        yield work
    finally:
        await work.close()


def of_process(pid: int, file: str) -> bytes:
    return Path(f"/proc/{pid}/{file}").read_bytes()


def completion(size: int, **fields: Any) -> bytes:
    return json.dumps({"prompt": [7] * 50, "seed": 5, "user": "x" * size, **fields}).encode()


def children() -> Iterator[int]:
    """Processes of ours that read bodies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == os.getpid() and b"serving.api.body_process" in words:
                yield int(entry.name)


async def begun(work: BodyWork) -> None:
    """The first lane's process has been given a body."""
    async with asyncio.timeout(60):
        while work._lanes[0]._process._process is not None:
            await asyncio.sleep(0.005)


async def test_a_plan_is_the_same_wherever_the_body_is_read(tokenizer: Tokenizer) -> None:
    async with reading(tokenizer) as work:
        completions, tokens = work.readers.completions, work.readers.tokens
        for size in (10, SMALL_BODY, LONG_BODY):
            body = completion(size, stream=True, stop=["x"], logit_bias={"5": 1.0})
            here, there = completions.prepare(body, HEAD), await work.run(completions.prepare, body, HEAD)
            assert replace(there.plan, created=here.plan.created) == here.plan
        text, about = "y" * SMALL_BODY, [{"role": "user", "content": "hi"}]
        schema = {"type": "object", "description": text}
        tool = {"type": "function", "name": "f", "parameters": schema}
        asked: list[tuple[Any, dict[str, Any]]] = [
            (work.readers.chat_completions, {"messages": about, "tools": [{"type": "function", "function": tool}]}),
            (work.readers.responses, {"input": about, "tools": [tool], "metadata": {"a": "b"}}),
            (
                work.readers.messages,
                {"messages": about, "max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}]},
            ),
            (work.readers.embeddings, {"input": ["hi", text]}),
        ]
        for reader, fields in asked:
            body = json.dumps({**fields, "seed": 1} if reader is not work.readers.embeddings else fields).encode()
            here, there = reader.prepare(body, HEAD), await work.run(reader.prepare, body, HEAD)
            assert _shown(there) == _shown(here)
        text = json.dumps({"prompt": "mill " * SMALL_BODY, "return_token_strs": True}).encode()
        assert await work.run(tokens.tokenize, text) == tokens.tokenize(text)
        assert len(list(children())) == 2
    assert list(children()) == []


def _shown(prepared: Any) -> Any:
    """Without the time at which it was made."""
    if not hasattr(prepared, "plan"):
        return replace(prepared, created=0)
    return replace(prepared.plan, created=0), vars(prepared.form) if hasattr(
        prepared.form, "__dict__"
    ) else prepared.form


async def test_an_error_keeps_its_class_and_field(tokenizer: Tokenizer) -> None:
    async with reading(tokenizer) as work:
        with pytest.raises(ContextLengthExceeded, match="maximum context length") as caught:
            await work.run(work.readers.completions.prepare, completion(9000, prompt=[7] * 9000), HEAD)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(InvalidRequest) as other:
            await work.run(work.readers.completions.prepare, completion(9000, n="a"), HEAD)
        assert other.value.param == "n"


async def test_a_process_that_ends_over_a_body_fails_that_request_alone(tokenizer: Tokenizer) -> None:
    async with reading(tokenizer) as work:
        completions = work.readers.completions
        await work.run(completions.prepare, completion(9000), HEAD)
        (pid,) = children()
        stop(pid)
        first = asyncio.create_task(work.run(completions.prepare, completion(9000), HEAD, client="a"))
        second = asyncio.create_task(work.run(completions.prepare, completion(9001), HEAD, client="b"))
        await begun(work)
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(InternalError, match="failed on this request"):
            await first
        assert (await second).plan.prompt_tokens == 50
        (other,) = children()
        assert other != pid
        stop(other)
        third = asyncio.create_task(work.run(completions.prepare, completion(9002), HEAD))
        await begun(work)
        os.kill(other, signal.SIGKILL)  # by somebody else: another one reads the body
        assert (await third).plan.prompt_tokens == 50


async def test_a_process_that_is_slow_to_end_was_ended_from_outside_all_the_same(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a machine that stood still for two seconds between the end of its pipes and its own made it a 500."""
    wait = Process.wait

    async def late(process: Process) -> int:
        await asyncio.sleep(2.5)
        return await wait(process)

    async with reading(tokenizer) as work:
        (pid,) = children()
        stop(pid)
        asking = asyncio.create_task(work.run(work.readers.completions.prepare, completion(9000), HEAD))
        await begun(work)
        with monkeypatch.context() as patched:
            patched.setattr(Process, "wait", late)
            os.kill(pid, signal.SIGKILL)
            assert (await asking).plan.prompt_tokens == 50


ANSWERS_NONSENSE = """
import struct, sys
length = struct.Struct("<Q")
for answer in (b"", b"nonsense"):
    sys.stdin.buffer.read(length.unpack(sys.stdin.buffer.read(length.size))[0])
    sys.stdout.buffer.write(length.pack(len(answer)) + answer)
    sys.stdout.flush()
sys.stdin.buffer.read()
"""


async def test_a_process_that_answers_nonsense_and_lives_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all of its lane waited twenty seconds for its end."""
    monkeypatch.setattr(body_process, "module_command", lambda module: (sys.executable, "-c", ANSWERS_NONSENSE))
    process, began = BodyProcess(b"settings"), time.monotonic()
    answer, error = await process.ask(b"frame")
    assert answer is None and isinstance(error, InternalError)
    assert time.monotonic() - began < body_process.ENDING_SECONDS / 2


async def test_a_body_over_which_two_processes_are_ended_from_outside_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[bytes]()

    async def ended(process: BodyProcess, frame: bytes) -> None:
        asked.append(frame)

    monkeypatch.setattr(BodyProcess, "_ask", ended)
    outcome, error = await BodyProcess(b"").ask(b"frame")
    assert outcome is None and isinstance(error, Unavailable) and error.retry_after
    assert asked == [b"frame"] * 2


async def test_a_body_that_takes_too_long_is_refused_and_the_next_one_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_process, "PATIENCE", 60)  # a busy machine may give it little of each second
    async with reading(tokenizer, budget=1) as work:
        slow = json.dumps({"messages": [{"role": "user", "content": "mill, river. " * 900_000}]}).encode()
        with pytest.raises(InvalidRequest, match="more than 1 s") as caught:
            await work.run(work.readers.chat_completions.prepare, slow, HEAD)
        assert caught.value.code == "body_too_costly"
        plan = await work.run(work.readers.completions.prepare, completion(LONG_BODY), HEAD)
        assert plan.plan.prompt_tokens == 50


async def test_who_sends_little_waits_for_nobody_who_sends_much(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a second client behind all of the first one's bodies, nor anybody for one who has left."""
    asked = []

    async def ask(process: BodyProcess, frame: bytes) -> Outcome:
        asked.append(len(frame))
        return await real(process, frame)

    real = BodyProcess.ask
    monkeypatch.setattr(BodyProcess, "ask", ask)
    async with reading(tokenizer) as work:
        completions = work.readers.completions
        large = json.dumps({"prompt": "mill " * 200_000}).encode()
        many = [asyncio.create_task(work.run(completions.prepare, large, HEAD, client="greedy")) for _ in range(6)]
        await asyncio.sleep(0)
        plan = await work.run(completions.prepare, completion(9000), HEAD, client="small")
        assert plan.plan.prompt_tokens == 50 and not any(task.done() for task in many[1:])
        await work.run(completions.prepare, completion(LONG_BODY), HEAD, client="other")
        assert sum(task.done() for task in many) <= 2
        for task in many:
            task.cancel()
        await work.run(completions.prepare, completion(LONG_BODY), HEAD, client="greedy")
        assert sum(size > len(large) for size in asked) <= 3
        await asyncio.gather(*many, return_exceptions=True)


@BOTH
def test_a_process_that_ends_while_idle_costs_nobody_anything(tokenizer: Tokenizer, run: Run) -> None:
    """Before: under uvloop, which the server runs on, its lane was gone for good, and every later body hung."""

    async def test() -> None:
        async with reading(tokenizer) as work:
            prepare = work.readers.completions.prepare
            for number in (signal.SIGKILL, signal.SIGXCPU):
                (pid,) = children()
                harm(pid, number)
                while list(children()):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                plan = await asyncio.wait_for(work.run(prepare, completion(9000), HEAD), 60)
                assert plan.plan.prompt_tokens == 50

    run(test())


@BOTH
def test_a_lane_goes_on_whatever_is_raised_in_it(
    tokenizer: Tokenizer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever's body it was is told; whoever comes next is served."""

    async def test() -> None:
        async with reading(tokenizer) as work:
            prepare = work.readers.completions.prepare

            async def fail(process: BodyProcess, frame: bytes) -> Outcome:
                raise LookupError("a mistake of ours")

            with monkeypatch.context() as patched:
                patched.setattr(BodyProcess, "ask", fail)
                for _ in range(2):
                    with pytest.raises(InternalError):
                        await asyncio.wait_for(work.run(prepare, completion(9000), HEAD), 60)
            plan = await asyncio.wait_for(work.run(prepare, completion(9000), HEAD), 60)
            assert plan.plan.prompt_tokens == 50

    run(test())


@BOTH
def test_a_process_that_stands_still_is_given_up(
    tokenizer: Tokenizer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: every body of its lane waited for ever."""
    monkeypatch.setattr(body_process, "PATIENCE", 0.05)

    async def test() -> None:
        async with reading(tokenizer) as work:
            prepare = work.readers.completions.prepare
            (pid,) = children()
            stop(pid)
            with pytest.raises(Unavailable) as caught:
                await asyncio.wait_for(work.run(prepare, completion(9000), HEAD), 60)
            assert caught.value.code == "body_unread" and caught.value.retry_after
            assert pid not in children()
            work._lanes[0]._process._patience = 60.0  # the next one may be slow
            assert (await work.run(prepare, completion(9000), HEAD)).plan.prompt_tokens == 50

    run(test())


async def test_the_budget_ends_with_the_answer(tokenizer: Tokenizer) -> None:
    """Before: what a process tidied after a body might end it, which was the next body's loss."""
    async with reading(tokenizer) as work:
        await work.run(work.readers.completions.prepare, completion(9000), HEAD)
        (pid,) = children()
        limits = of_process(pid, "limits").decode().splitlines()
        assert next(line for line in limits if line.startswith("Max cpu time")).split()[3:5] == ["unlimited"] * 2


async def test_who_waits_when_the_lanes_close_is_told(tokenizer: Tokenizer) -> None:
    """Before: a 500 when everything else had gone."""
    async with reading(tokenizer) as work:
        prepare = work.readers.completions.prepare
        (pid,) = children()
        stop(pid)
        tasks = [asyncio.create_task(work.run(prepare, completion(9000), HEAD)) for _ in range(3)]
        await begun(work)
        await asyncio.wait_for(work.close(), 30.0)
        for task in [*tasks, asyncio.create_task(work.run(prepare, completion(9000), HEAD))]:
            with pytest.raises(Unavailable) as caught:
                await task
            assert caught.value.code == "draining"
    assert list(children()) == []


async def test_who_has_hung_up_takes_no_room(tokenizer: Tokenizer) -> None:
    """Before: 256 bodies nobody waited for kept all others out of the lane."""
    async with reading(tokenizer) as work:
        prepare = work.readers.completions.prepare
        (pid,) = children()
        stop(pid)
        first = asyncio.create_task(work.run(prepare, completion(9000), HEAD, client="first"))
        for client in "abc":
            gone = [asyncio.create_task(work.run(prepare, completion(9000), HEAD, client=client)) for _ in range(128)]
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            assert not [one for one in await asyncio.gather(*gone, return_exceptions=True) if type(one) is Overloaded]
        honest = asyncio.create_task(work.run(prepare, completion(9000), HEAD, client="honest"))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGCONT)
        assert (await first).plan.prompt_tokens == (await honest).plan.prompt_tokens == 50


async def test_no_key_goes_to_a_process(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bytes] = []

    async def ask(process: BodyProcess, frame: bytes) -> Outcome:
        frames.append(frame)
        return await real(process, frame)

    real = BodyProcess.ask
    monkeypatch.setattr(BodyProcess, "ask", ask)
    monkeypatch.setenv("HF_TOKEN", "sk-other")
    head = replace(HEAD, headers=Headers({"authorization": "Bearer sk-a", "x-api-key": "sk-a", "x-session-id": "kept"}))
    async with reading(tokenizer) as work:
        prepared = await work.run(work.readers.completions.prepare, completion(9000), head)
        assert prepared.plan.sequences[0].request.session == "kept"
        assert b"kept" in frames[0] and b"sk-a" not in frames[0]
        (pid,) = children()
        assert b"sk-other" not in of_process(pid, "environ")


async def test_one_that_cannot_begin_says_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_process, "module_command", lambda _: ("/bin/false",))
    with pytest.raises(Unavailable, match="cannot begin"):
        async with reading(tokenizer):
            pass
