"""What a worker's heartbeat says of its load: queue, leases, objectives and the cost of its steps."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.worker.worker import tpot_counts
from serving.engine.step_fit import StepFit
from serving.messages import TPOT_BINS_MS, Role, Slo, WorkerStatus
from serving.proto import millrace_pb2 as pb
from serving.step_cost import StepCost, StepLoad
from serving.wire import from_pb, to_pb
from tests.decode.workers import Worker
from tests.fakes.sequences import make_sequence

COST = StepCost(fixed=1.0, token=0.1, pair=0.01, sequence=0.02, context=0.001, error=0.1, samples=9)


def mixed(*, tokens: int = 8, seqs: int = 300, blocks: int = 600) -> Worker:
    made = Worker(Role.MIXED, tokens=tokens, seqs=seqs, blocks=blocks)
    made.worker.costs.meter.fit = StepFit(COST, COST)
    return made


def decoding(worker: Worker, prompt: int, number: int, tpot_ms: float | None = None) -> None:
    """A sequence whose KV is here, with its first token."""
    seq = make_sequence(worker.kv, range(prompt), stays=True, request_id=str(number), slo=Slo(tpot_ms=tpot_ms))
    worker.kv.open(seq)
    seq.computed = len(seq.tokens)
    seq.tokens.append(1)
    worker.decoding.add(seq)


def queued(worker: Worker, length: int, first: int = 0) -> None:
    """A prompt of one token to draw, unlike others in its `first` token."""
    seq = make_sequence(worker.kv, range(first, first + length), stays=True, max_tokens=1)
    worker.kv.open(seq)
    worker.prefilling.add(seq)


def test_an_idle_worker_reports_its_limits_and_a_guess() -> None:
    made = Worker(Role.MIXED, tokens=8)
    status = made.worker.status()
    assert (status.waiting_seconds, status.leases, status.context_tokens, status.prompt_share) == (0.0, 0, 0, 0.0)
    assert status.max_batched_tokens == 8 and sum(status.tpot_counts) == 0
    assert status.step_cost is not None and status.step_cost.samples == 0
    assert from_pb(to_pb(status, pb.WorkerStatus), WorkerStatus) == status


def test_the_running_sequences_count_by_context_and_objective() -> None:
    made = mixed()
    for number, objective in enumerate((None, 5.0, 5.1, 640.0, 641.0, 50.0)):
        decoding(made, 10 + number, number, objective)
    status = made.worker.status()
    assert status.running == 6 and status.context_tokens == sum(11 + number for number in range(6))
    expected = [0] * (len(TPOT_BINS_MS) + 1)
    for place in (0, 1, TPOT_BINS_MS.index(56.0), len(TPOT_BINS_MS) - 1, -1, -1):
        expected[place] += 1
    assert status.tpot_counts == tuple(expected)


@given(st.lists(st.none() | st.floats(0.1, 2000)))
def test_every_sequence_is_in_the_bin_of_its_objective(objectives: list[float | None]) -> None:
    counts = tpot_counts([make_sequence(None, [1], slo=Slo(tpot_ms=objective)) for objective in objectives])
    for place, (below, bound) in enumerate(itertools.pairwise((0.0, *TPOT_BINS_MS))):
        assert counts[place] == sum(found is not None and below < found <= bound for found in objectives)
    assert counts[-1] == sum(found is None or found > TPOT_BINS_MS[-1] for found in objectives)


def test_the_queue_is_timed_chunk_by_chunk_beside_the_decodes() -> None:
    """Two decodes leave six tokens of eight: 6 + 4, 2 + 6 and 3 are the steps of prompts of 10 and 11."""
    made = mixed()
    decoding(made, 20, 1)
    decoding(made, 30, 2)
    assert made.worker.status().waiting_seconds == 0.0
    queued(made, 10)
    queued(made, 11)
    beside = StepLoad.of(20, 1) + StepLoad.of(30, 1)
    steps = (
        beside + StepLoad.of(0, 6),
        beside + StepLoad.of(6, 4) + StepLoad.of(0, 2),
        beside + StepLoad.of(2, 6),
        beside + StepLoad.of(8, 3),
    )
    assert made.worker.status().waiting_seconds == pytest.approx(sum(map(COST.seconds, steps)))


def test_the_waiting_seconds_are_those_of_the_steps_that_follow() -> None:
    made = mixed(tokens=16)
    loads: list[StepLoad] = []
    made.prefilling.on_measured = lambda record: loads.append(record.load)
    for number, length in enumerate((5, 40, 1, 16, 23)):
        queued(made, length, first=100 * number)
    predicted = made.worker.status().waiting_seconds
    while made.prefilling.queue:
        made.step()
    assert len(loads) == 6 and predicted == pytest.approx(sum(map(COST.seconds, loads)))


@given(
    prompts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), max_size=12),
    chunk=st.integers(1, 40),
    rows=st.integers(0, 5),
)
def test_the_closed_form_is_the_sum_over_steps(prompts: list[tuple[int, int]], chunk: int, rows: int) -> None:
    beside = StepLoad(rows, 7 * rows, rows, 7 * rows)
    steps: list[StepLoad] = []
    left = 0
    for start, count in prompts:
        while count > 0:
            if not left:
                steps.append(beside)
                left = chunk
            taken = min(left, count)
            steps[-1] += StepLoad.of(start, taken)
            start, count, left = start + taken, count - taken, left - taken
    found = COST.queue_seconds([(start, start + count) for start, count in prompts], chunk, beside)
    assert found == pytest.approx(sum(map(COST.seconds, steps)))


async def test_leases_count_whether_they_run_or_not() -> None:
    made = mixed()
    session = await made.session()
    await made.lease(session, [1, 2, 3], "r/1")
    await made.lease(session, [1, 2, 3], "r/2")
    status = made.worker.status()
    assert (status.leases, status.running) == (2, 0)


def test_the_share_of_prompts_follows_the_steps() -> None:
    made = Worker(Role.MIXED, tokens=8, blocks=600)
    now = [0.0]
    made.engine.clock = lambda: now[0]

    def pass_time(work: object) -> None:
        now[0] += 0.5

    made.runner.during = pass_time
    queued(made, 400)
    while made.prefilling.queue:
        made.step()
    status = made.worker.status()
    assert status.prompt_share > 0.85
    assert status.step_cost is not None and status.step_cost.samples > 0
    assert status.step_cost.seconds(StepLoad.of(200, 8)) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_workers_of_one_side_report_too(role: Role) -> None:
    status = Worker(role).worker.status()
    assert len(status.tpot_counts) == (0 if role is Role.PREFILL else len(TPOT_BINS_MS) + 1)


def test_a_full_worker_reports_quickly() -> None:
    made = mixed(blocks=4000)
    for number in range(256):
        decoding(made, 30, number, 50.0)
    for _ in range(100):
        queued(made, 60)
    taken = []
    for _ in range(9):
        began = time.thread_time()
        made.worker.status()
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.005
