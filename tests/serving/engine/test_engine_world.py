"""A mixed worker's engine under random load: leases of its own, prompts computed for others, KV handed to it, hang-ups.

A tiny pool, so that everyone waits, shares, and gives way. Whatever happens, every sequence ends once, its tokens are
those of an undisturbed run, no block is read that holds another's KV, and nothing is left at the end. So it is with
steps one after the other, and with steps begun ahead of the tokens of the one before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.manager import KVCacheManager
from prefill.chunking import SlackChunks
from prefill.ordering import SlackOrder
from prefill.scheduler import PrefillScheduler
from serving.engine.engine import Engine
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import NoRoom, Preempted
from serving.messages import Request, Slo
from serving.step_cost import StepCost
from tests.fakes.sequences import make_request, make_sequence
from tests.prefill.scripted import (
    VOCAB,
    ScriptedRunner,
    make_decoding,
    make_engine,
    make_kv,
    next_token,
    written_out,
)
from tests.serving.engine.scripted_overlap import LateRunner, make_ahead_engine

COST = StepCost(fixed=0.01, token=0.05, pair=0.001, sequence=0.1, context=0.01, samples=100)  # up to a second a step


@dataclass
class Job:
    """A request: its tokens so far, how it ended, and its sequence while it has one."""

    request: Request
    kind: str  # local: prefilled and decoded here; passing: prefilled for another; arriving: prefilled elsewhere
    output: list[int] = field(default_factory=list)
    ending: str | None = None
    seq: SequenceState | None = None


class World:
    def __init__(
        self,
        seed: int,
        size: int,
        blocks: int,
        tokens: int,
        seqs: int,
        caching: bool,
        drafts: int,
        ahead: bool,
        goals: bool = False,
    ):
        self.choice = random.Random(seed)
        self.kv: KVCacheManager = make_kv(blocks, size, caching=caching)
        self.longest = blocks * size
        self.decode = make_decoding(self.kv, drafts=drafts)
        self.goals = goals
        parts: dict[str, Any] = {"order": SlackOrder(lambda: COST), "chunks": SlackChunks(lambda: COST)}
        self.prefill = PrefillScheduler(self.kv, then=self.decode.add, **(parts if goals else {}))
        self.engine: Engine
        self.runner: ScriptedRunner
        make = make_ahead_engine if ahead else make_engine
        self.engine, self.runner = make(self.kv, [self.decode, self.prefill], tokens=tokens, seqs=seqs)
        self.now = 0.0
        self.engine.clock = lambda: self.now
        self.runner.during = lambda work: self.hang_up(0.04)
        if isinstance(self.runner, LateRunner):
            self.runner.opaque = {str(number) for number in range(10) if self.choice.random() < 0.1}
        if self.decode.choice is not None:
            self.decode.choice.trial = self.choice.randrange(6)
        self.jobs = [self.new_job(n) for n in range(self.choice.randrange(1, 10))]
        self.waiting = list(self.jobs)

    def new_job(self, number: int) -> Job:
        prompt = self.choice.choices((0, 1), k=self.choice.randrange(1, self.longest - 1))
        kind = self.choice.choice(("local", "local", "passing", "arriving"))
        stops = (self.choice.randrange(VOCAB),) if self.choice.random() < 0.5 else ()
        longest = self.choice.randrange(2, 15)
        fields: dict[str, Any] = {}
        if self.goals and self.choice.random() < 0.7:
            fields = {"priority": self.choice.randrange(3), "slo": Slo(tpot_ms=self.choice.choice((None, 5.0, 2000.0)))}
        request = make_request(prompt, request_id=str(number), max_tokens=longest, stop_token_ids=stops, **fields)
        return Job(request, kind)

    def sequences(self) -> list[SequenceState]:
        return [job.seq for job in self.jobs if job.seq is not None]

    # ---- what the worker's doors would do ----

    def place(self) -> None:
        """The first that waits, as the router would: leases need room and some to spare, passing prompts queue."""
        if not self.waiting or self.choice.random() < 0.4:
            return
        job = self.waiting[0]
        sampling = job.request.sampling
        fields: dict[str, Any] = {
            "request_id": job.request.request_id,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "priority": job.request.priority,
            "slo": job.request.slo,
            "first_token_in": self.choice.uniform(-1.0, 9.0) if self.goals and self.choice.random() < 0.5 else None,
            "generated": job.output,
            "now": self.now,
        }
        seq = make_sequence(self.kv, job.request.prompt, stays=job.kind != "passing", **fields)
        if job.kind != "passing":
            try:
                self.kv.open(seq, headroom=sum(seq.stays for seq in self.sequences()))
            except NoRoom:
                return
        self.waiting.pop(0)
        job.seq = seq
        if job.kind == "arriving":
            self.hand_over(job, seq)
        else:
            self.prefill.add(seq)

    def hand_over(self, job: Job, seq: SequenceState) -> None:
        for position in range(seq.computed, len(seq.tokens)):
            self.runner.kv[self.slot(seq, position)] = (seq.prefix.root, tuple(seq.tokens[: position + 1]))
        seq.computed = len(seq.tokens)
        self.kv.publish(seq)
        seq.tokens.append(next_token(seq.tokens))
        job.output.append(seq.tokens[-1])
        finish = seq.finish_for(seq.tokens[-1], frozenset(), self.longest)
        if finish is not None:
            self.end(job, finish)
        else:
            self.decode.add(seq)

    def hang_up(self, chance: float) -> None:
        live = [job for job in self.jobs if job.seq is not None]
        if live and self.choice.random() < chance:
            self.end(self.choice.choice(live), "abort")

    def end(self, job: Job, how: str) -> None:
        assert job.ending is None and job.seq is not None, "a sequence ended twice"
        job.ending = how
        self.engine.end(job.seq)
        job.seq = None

    # ---- what comes out ----

    def step(self) -> None:
        self.now += self.choice.random() if self.goals else 0.0
        older = list(self.decode.running)
        for output in self.engine.step() or []:
            job = self.jobs[int(output.seq.request.request_id)]
            if job.seq is output.seq:  # else it was hung up on while the step ran
                self.take(job, output, older)
        flying = [seq for seq in self.engine.flying if seq not in self.sequences()]
        assert self.kv.unaccounted([*self.sequences(), *flying]) == 0
        for seq in self.sequences():
            self.check_published(seq)

    def check_published(self, seq: SequenceState) -> None:
        """What others may find under the sequence's keys is the KV of tokens it has."""
        for position in range(seq.prefix.published * self.kv.block_size):
            assert self.runner.kv[self.slot(seq, position)] == (seq.prefix.root, tuple(seq.tokens[: position + 1]))

    def slot(self, seq: SequenceState, position: int) -> int:
        size = self.kv.block_size
        return seq.blocks[position // size] * size + position % size

    def settle(self) -> None:
        """The worker stops: what is in flight comes to its end, and brings nothing, for nobody is left."""
        assert self.engine.settle() == []

    def take(self, job: Job, output: SequenceOutput, older: list[SequenceState]) -> None:
        if output.error is not None:
            assert isinstance(output.error, Preempted)
            staying = [seq for seq in older if seq in self.decode.running]
            if not self.goals:
                assert all(older.index(seq) < older.index(output.seq) for seq in staying), "the oldest gave way first"
            assert older[0] is not output.seq or not staying, "the first gave way to another"
            job.seq = None
            self.waiting.insert(0, job)
            return
        assert output.delta is not None and output.delta.index == len(job.output), "a token was skipped or repeated"
        job.output += output.delta.tokens
        if output.delta.finish is not None:
            self.end(job, output.delta.finish)
        elif job.kind == "passing":
            self.end(job, "handed over")


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    blocks=st.integers(3, 10),
    tokens=st.integers(1, 9),
    seqs=st.integers(1, 5),
    caching=st.booleans(),
    drafts=st.integers(0, 4),
)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("goals", [False, True], ids=["plain", "with objectives"])
def test_everyone_is_served_exactly_once(
    goals: bool, ahead: bool, seed: int, size: int, blocks: int, tokens: int, seqs: int, caching: bool, drafts: int
) -> None:
    world = World(seed, size, blocks, tokens, seqs, caching, drafts, ahead, goals)
    for _ in range(5000):
        world.place()
        world.hang_up(0.01)
        world.step()
        if all(job.ending for job in world.jobs):
            break
    assert all(job.ending for job in world.jobs), "somebody waits for ever"
    for job in world.jobs:
        length = min(job.request.sampling.max_tokens, world.longest - len(job.request.prompt))
        length = 1 if job.kind == "passing" else length
        expected = written_out(job.request.prompt, length)
        stops = [n for n, token in enumerate(expected, 1) if token in job.request.sampling.stop_token_ids]
        expected = expected[: min(stops, default=length)]
        assert job.output == (expected[: len(job.output)] if job.ending == "abort" else expected)
    assert all(sum(counts) <= tokens and len(counts) <= seqs for counts in world.runner.counts)
    world.settle()
    assert world.kv.allocator.held == 0 and world.kv.unaccounted([]) == 0
    assert world.decode.sequences() == [] == world.prefill.sequences() and world.engine.flying == []
