"""The engine: one ragged batch after another, schedule → run → postprocess.

It owns the step, not the thread it runs in nor the sockets around it. Everything a step touches besides the model
is guarded by `lock`: others may open, cancel and release sequences between steps, and while the model computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from serving.engine.output import Output
from serving.engine.plan import KV, Plan, Scheduler, Work
from serving.engine.sampling import Sampled, SamplingFailed
from serving.engine.sequence import Sequence
from serving.errors import Preempted
from serving.messages import FinishReason, TokenLogprob

LayerDone = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one step did and how long it took, in seconds; the cost model and the metrics are fed by these."""

    sequences: int
    new_tokens: int
    context_tokens: int  # tokens of KV read, summed over the batch
    run_seconds: float  # in the model and the sampler
    step_seconds: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """`sampled[i]` is the draw for work i, None where its prompt goes on; prompt logprobs likewise."""

    sampled: list[Sampled | SamplingFailed | None]
    prompt_logprobs: dict[int, list[TokenLogprob | None]]


class Runner:
    """What the engine asks of the thing that computes (serving.engine.runner.ModelRunner)."""

    def run(self, work: Seq[Work], layer_done: LayerDone | None) -> RunResult:
        raise NotImplementedError


class Engine:
    """A model, a KV cache, and the schedulers of the worker's role in the order they fill a step."""

    def __init__(
        self,
        runner: Runner,
        kv: KV,
        schedulers: Seq[Scheduler],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.runner = runner
        self.kv = kv
        self.schedulers = list(schedulers)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.lock = threading.RLock()
        self.layer_listener: Callable[[Seq[Work], int], None] | None = None
        self.flying: list[Sequence] = []  # sequences of the step that runs now
        self.step_began: float | None = None
        self.last_step: StepRecord | None = None
        self.steps = 0

    def step(self) -> list[Output] | None:
        """Run one step; what it brought out, or None when there was nothing to do."""
        began = self.clock()
        plan, outputs = self.schedule(began)
        if not plan.work:
            return outputs or None
        self.step_began = began
        result, run_seconds = self._run(plan)
        outputs += self.postprocess(plan, result)
        self._record(plan, began, run_seconds)
        return outputs

    def schedule(self, now: float) -> tuple[Plan, list[Output]]:
        """Let each scheduler fill the step; sequences that lost their blocks come out at once."""
        with self.lock:
            plan = Plan(self.max_num_batched_tokens, self.max_num_seqs)
            for scheduler in self.schedulers:
                scheduler.fill(plan, now)
            self.flying = [work.seq for work in plan.work]
            for seq in self.flying:
                seq.in_flight = True
            outputs = []
            for seq in plan.preempted:
                seq.ended = True
                outputs.append(Output(seq, error=Preempted("KV blocks ran out on this worker")))
            return plan, outputs

    def _run(self, plan: Plan) -> tuple[RunResult, float]:
        listener = self.layer_listener
        handing_off = [work for work in plan.work if work.seq.handoff is not None]
        layer_done = partial(listener, handing_off) if listener is not None and handing_off else None
        began = self.clock()
        result = self.runner.run(plan.work, layer_done)
        return result, self.clock() - began

    def postprocess(self, plan: Plan, result: RunResult) -> list[Output]:
        """Account for the computed KV, append the drawn tokens, end what has ended."""
        outputs = []
        with self.lock:
            for i, (work, sample) in enumerate(zip(plan.work, result.sampled, strict=True)):
                seq = work.seq
                seq.in_flight = False
                if seq.ended:  # cancelled while the model ran: its blocks were waiting for this moment
                    self.kv.release(seq)
                    continue
                seq.computed += work.count
                self.kv.publish(seq)
                seq.prompt_logprobs += result.prompt_logprobs.get(i, [])
                if sample is not None:
                    outputs.append(self._append(work, sample))
            self.flying = []
        return outputs

    def _append(self, work: Work, sample: Sampled | SamplingFailed) -> Output:
        seq = work.seq
        prefilled = len(seq.tokens) == seq.start
        if isinstance(sample, SamplingFailed):
            self.end(seq)
            return Output(seq, error=sample.error(), prefilled=prefilled)
        seq.tokens.append(sample.token)
        finish: FinishReason | None = seq.finish_for(sample.token, self.eos_token_ids, self.max_model_len)
        logprobs = (sample.logprob,) if sample.logprob is not None else ()
        output = Output(seq, delta=seq.delta((sample.token,), logprobs, finish), prefilled=prefilled)
        if finish is not None:
            self.end(seq)
        else:
            work.by.stepped(seq)
        return output

    def end(self, seq: Sequence) -> None:
        """Take the sequence out and free its blocks, at the end of the step if it is part of one. Safe to repeat."""
        with self.lock:
            seq.ended = True
            for scheduler in self.schedulers:
                scheduler.remove(seq)
            if not seq.in_flight:
                self.kv.release(seq)

    def _record(self, plan: Plan, began: float, run_seconds: float) -> None:
        self.steps += 1
        self.step_began = None
        self.last_step = StepRecord(
            sequences=len(plan.work),
            new_tokens=sum(work.count for work in plan.work),
            context_tokens=sum(len(work.seq.tokens) for work in plan.work),
            run_seconds=run_seconds,
            step_seconds=self.clock() - began,
        )

    @property
    def stalled_seconds(self) -> float:
        """Age of the step that runs now; 0 between steps."""
        began = self.step_began
        return 0.0 if began is None else self.clock() - began
