"""The engine: one ragged batch after another, schedule → run → postprocess.

It owns the step, not the thread it runs in nor the sockets around it. Everything a step touches besides the model
is guarded by `lock`: others may open, cancel and release sequences between steps, and while the model computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from serving.batch.layer_barrier import LayerBarrier
from serving.engine.blame import run_step
from serving.engine.drafting import fill_in_drafts
from serving.engine.plan import KVBlocks, PlannedLoad, Scheduler, StepPlan, StepRecord, StepTotals, Work
from serving.engine.proposed import NO_DRAFTS, Proposing
from serving.engine.proposer import Proposer
from serving.engine.run import LayerDone, Runner, RunResult, RunTimes
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.engine.tracing import TraceWriter
from serving.errors import Preempted
from serving.messages import Delta, FinishReason, TokenLogprob
from serving.sampling.sampler import Sampled, SamplingFailed
from serving.step_cost import StepLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """How much a step may hold, and where sequences end. Tokens and sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: frozenset[int]


Lock = AbstractContextManager[object]
"""Guards a worker's sequences and blocks; the same thread may take it again."""


@dataclass(slots=True)  # not frozen: one for every step, and frozen ones take three times as long to make
class BegunStep:
    """A step that is planned and not accounted for. Seconds on the engine's clock."""

    plan: StepPlan
    began: float
    load: PlannedLoad
    planning_seconds: float
    proposing: Proposing = NO_DRAFTS


class Engine:
    """A model, a KV cache, and the schedulers of the worker's role in the order they fill a step.

    A sequence's tokens after its second are told `tell_every` so many together, but for its last (SequenceState.untold
    has what is not told yet); a step that brings several tokens of a sequence, or scores of one, tells them at once.
    """

    can_overlap = False  # True if a step may begin before the tokens of the one before it are known

    def __init__(
        self,
        runner: Runner,
        kv: KVBlocks,
        schedulers: Sequence[Scheduler],
        limits: StepLimits,
        *,
        lock: Lock | None = None,
        clock: Callable[[], float] = time.monotonic,
        trace: TraceWriter | None = None,
        proposer: Proposer | None = None,
        tell_every: int = 1,
    ):
        self.runner = runner
        self.kv = kv
        self.schedulers = list(schedulers)
        self.limits = limits
        self.clock = clock
        self.trace = trace
        self.proposer = proposer
        self.tell_every = tell_every
        self.lock: Lock = threading.RLock() if lock is None else lock
        self.flying: list[SequenceState] = []  # sequences of the steps begun and not accounted for, step by step
        self.barrier: LayerBarrier | None = None  # where that step may wait
        self.step_began: float | None = None
        self.step_ended: float | None = None  # the one before, unless the engine has slept since
        self.totals = StepTotals()

    def step(self, layer_done: LayerDone | None = None) -> list[SequenceOutput] | None:
        """Run one step; what it brought out, or None when there was nothing to do."""
        began = self.clock()
        plan, outputs = self.schedule(began)
        if not plan.work:
            return self._nothing(outputs)
        return outputs + self._step(plan, began, layer_done)

    def _nothing(self, outputs: list[SequenceOutput]) -> list[SequenceOutput] | None:
        """What a call brings out that has planned no work: with None the engine's thread sleeps."""
        if not outputs:
            self.step_ended = None
        return outputs or None

    def settle(self) -> list[SequenceOutput]:
        """Finish what has been begun ahead of its time: no step begins after this."""
        return []

    def _step(self, plan: StepPlan, began: float, layer_done: LayerDone | None) -> list[SequenceOutput]:
        """The rest of a step, once it is planned."""
        step = self.begun(plan, began)
        return self.finish(step, run_step(self.runner, plan.work, layer_done))

    def begun(self, plan: StepPlan, began: float) -> BegunStep:
        """The planned work, not empty, is about to run: `finish` this with what came of it."""
        self.step_began = began
        planned = self.clock()
        proposing = fill_in_drafts(self.proposer, plan.work)
        return BegunStep(plan, began, plan.load(), planned - began, proposing)

    def finish(self, step: BegunStep, result: RunResult) -> list[SequenceOutput]:
        """Account for a step that has run; what it brought out."""
        outputs = self.postprocess(step.plan, result)
        self.step_began = None
        self._record(
            *(step.plan, step.load, step.began, self.clock(), step.planning_seconds, result.times),
            proposing=step.proposing,
        )
        return outputs

    def schedule(self, now: float) -> tuple[StepPlan, list[SequenceOutput]]:
        """Let each scheduler fill the step; sequences that lost their blocks come out at once."""
        with self.lock:
            plan = StepPlan(self.limits.max_num_batched_tokens, self.limits.max_num_seqs, can_overlap=self.can_overlap)
            for scheduler in self.schedulers:
                scheduler.fill(plan, now)
            if plan.paused and not plan.work:  # in vain: no step would end, and nothing might wake the engine
                plan.may_pause = False
                for scheduler in self.schedulers:
                    scheduler.fill(plan, now)
            self.totals.paused += plan.paused
            self.begin(plan)
            outputs = []
            for seq in plan.preempted:
                seq.ended = True
                outputs.append(SequenceOutput(seq, error=Preempted("KV blocks ran out on this worker")))
            return plan, outputs

    def begin(self, plan: StepPlan) -> None:
        """From now on the planned sequences' blocks are kept until the step is accounted for. Under the lock."""
        self.barrier = plan.barrier
        sequences = [work.seq for work in plan.work]
        for seq in sequences:
            seq.in_flight += 1
        self.flying += sequences

    def postprocess(self, plan: StepPlan, result: RunResult) -> list[SequenceOutput]:
        """Account for the computed KV, append the drawn tokens, end what has ended."""
        outputs = []
        prompt_logprobs, embeddings = result.prompt_logprobs, result.embeddings
        plain = not prompt_logprobs and not embeddings
        with self.lock:
            for i, (work, drawn) in enumerate(zip(plan.work, result.drawn, strict=True)):
                seq = work.seq
                seq.in_flight -= 1
                if seq.ended:  # since the step began: its blocks were waiting for this moment, or for the next step's
                    if not seq.in_flight:
                        self.kv.release(seq)
                    continue
                if work.count == 1 and plain and len(drawn) == 1 and work.barrier is None and not work.cut:
                    output = self._append_one(work, drawn[0])
                    if output is not None:
                        outputs.append(output)
                    continue
                if work.barrier is not None and work.left:
                    if seq.incoming.arrival is not None:  # else all has come after all
                        seq.incoming.arrival.leave()
                    continue
                if i in prompt_logprobs:
                    seq.prompt_logprobs += prompt_logprobs[i]
                seq.computed += work.count - len(work.draft)
                if drawn:
                    outputs.append(self._append(work, drawn))
                    continue
                self.kv.publish(seq)
                if i in embeddings:
                    outputs.append(self._embedded(seq, embeddings[i]))
            self.flying = self.flying[len(plan.work) :]
            self.barrier = None
        return outputs

    def _append(self, work: Work, drawn: Sequence[Sampled | SamplingFailed]) -> SequenceOutput:
        """Take the drawn tokens up to the first that differs from its draft or ends the sequence."""
        assert self.tell_every == 1 or work.of_prompt, "drafted tokens are told at once"
        seq, draft, limits = work.seq, work.draft, self.limits
        prefilled = len(seq.tokens) == seq.start
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: FinishReason | None = None
        for i, sample in enumerate(drawn):
            if isinstance(sample, SamplingFailed):
                self._finish(seq)
                return SequenceOutput(seq, error=sample.error(), prefilled=prefilled)
            token = sample.token
            seq.tokens.append(token)
            tokens.append(token)
            if sample.logprob is not None:
                logprobs.append(sample.logprob)
            finish = seq.finish_for(token, limits.eos_token_ids, limits.max_model_len)
            if finish is not None or i == len(draft) or token != draft[i]:
                break
        accepted = len(tokens) - 1
        seq.computed += accepted  # the KV of accepted tokens is as good as any
        if drafted := len(draft) + work.cut:
            work.by.verified(seq, drafted, accepted)
        self.kv.publish(seq)
        output = SequenceOutput(seq, delta=seq.delta(tuple(tokens), tuple(logprobs), finish), prefilled=prefilled)
        if finish is not None:
            self._finish(seq)
        else:
            work.by.stepped(seq)
        return output

    def _append_one(self, work: Work, sample: Sampled | SamplingFailed) -> SequenceOutput | None:
        """Take the one token that was drawn after one was computed: `_append`, as it is for nearly all tokens.

        None where it is told later.
        """
        seq = work.seq
        seq.computed += 1
        tokens = seq.tokens
        length = len(tokens)
        prefilled = length == seq.start
        if isinstance(sample, SamplingFailed):
            self._finish(seq)
            return SequenceOutput(seq, None, sample.error(), prefilled)
        token = sample.token
        tokens.append(token)
        later = length - seq.told < self.tell_every - 1 and length > seq.start + 1 and sample.logprob is None
        finish = seq.finish_for(token, self.limits.eos_token_ids, self.limits.max_model_len)
        if prefilled or seq.offload is not None or not seq.computed % self.kv.block_size:  # else no block is full now
            self.kv.publish(seq)
        if finish is None:
            work.by.stepped(seq)
            if later:
                return None
        else:
            self._finish(seq)
        if length > seq.told:
            return SequenceOutput(seq, seq.untold(finish=finish), None, prefilled)
        logprobs = () if sample.logprob is None else (sample.logprob,)
        return SequenceOutput(seq, seq.delta((token,), logprobs, finish), None, prefilled)

    def _embedded(self, seq: SequenceState, embedding: bytes | SamplingFailed) -> SequenceOutput:
        """The prompt is computed, and that is all that was asked for."""
        self._finish(seq)
        if isinstance(embedding, SamplingFailed):
            return SequenceOutput(seq, error=embedding.error(), prefilled=True)
        delta = Delta(index=0, tokens=(), finish=FinishReason.STOP, cached_tokens=seq.cached, embedding=embedding)
        return SequenceOutput(seq, delta=delta, prefilled=True)

    def _finish(self, seq: SequenceState) -> None:
        """No more tokens here. The blocks of one that leaves may still be read: its prefill run frees them."""
        if seq.stays:
            self.end(seq)
        else:
            for scheduler in self.schedulers:
                scheduler.remove(seq)

    def end(self, seq: SequenceState) -> None:
        """Take the sequence out and free its blocks, at the end of the step if it is part of one. Safe to repeat."""
        with self.lock:
            seq.ended = True
            for scheduler in self.schedulers:
                scheduler.remove(seq)
            if not seq.in_flight:
                self.kv.release(seq)
            elif seq.incoming.arrival is not None:
                seq.incoming.arrival.barrier.fail()

    def hurry(self) -> None:
        """There may be other work: a step does not wait for KV from elsewhere meanwhile."""
        barrier = self.barrier
        if barrier is not None:
            barrier.hurry()

    def _record(
        self,
        plan: StepPlan,
        load: PlannedLoad,
        began: float,
        ended: float,
        schedule_seconds: float,
        times: RunTimes,
        hidden_seconds: float = 0.0,
        proposing: Proposing = NO_DRAFTS,
    ) -> None:
        barrier = plan.barrier  # a sequence that waits at one is alone in its step
        left, waited = (barrier.left, barrier.waited_seconds) if barrier is not None else (False, 0.0)
        before, self.step_ended = self.step_ended, ended
        record = StepRecord(
            began=began,
            load=StepLoad() if left else load.step,
            prompt_tokens=0 if left else load.prompt_tokens,
            schedule_seconds=schedule_seconds,
            batch_seconds=times.batch,
            forward_seconds=times.forward,
            sample_seconds=times.sample,
            step_seconds=ended - began,
            waited_seconds=waited,
            hidden_seconds=hidden_seconds,
            proposing=proposing,
            cadence_seconds=max(0.0, ended - (began if before is None else before) - waited),
        )
        self.totals.add(record)
        if record.new_tokens:
            for scheduler in self.schedulers:
                scheduler.measured(record)
        if self.trace is not None:
            self.trace.step(record)

    @property
    def stalled_seconds(self) -> float:
        """Age of the step that runs now, or of what it last waited for; 0 between steps."""
        began, barrier = self.step_began, self.barrier
        if began is None:
            return 0.0
        return self.clock() - (began if barrier is None else max(began, barrier.moved_at))
