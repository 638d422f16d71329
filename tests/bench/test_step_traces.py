"""Of a server's traces each run gets its own steps, and a run of hardly a step none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.deployments import DEPLOYMENTS
from bench.step_traces import TAKES_STEPS, cut_steps, logs_of, steps_of, trace_flags
from deploy import cli
from deploy.simulator.command import study_of
from deploy.worker.build import trace_writer
from serving.engine.plan import StepRecord
from serving.step_cost import StepLoad

COST = {"fixed": 5e-3, "token": 1e-3, "pair": 0.0, "sequence": 0.0, "context": 0.0, "error": 0.1, "samples": 100}
STEP = StepRecord(
    began=0.0,
    load=StepLoad(1, 100.0, 1, 100.0),
    schedule_seconds=0.0,
    batch_seconds=0.0,
    forward_seconds=6e-3,
    sample_seconds=0.0,
    step_seconds=6e-3,
    cadence_seconds=12e-3,
)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_run_has_the_steps_that_began_in_it(name: str, tmp_path: Path) -> None:
    chosen = DEPLOYMENTS[name]
    logs = logs_of(tmp_path / "found")
    logs.mkdir()
    flag, path = trace_flags(logs, chosen)
    assert flag == "--profile"
    for role in chosen.roles:
        trace = trace_writer(path, f"{role}-0")
        assert trace is not None
        for second in range(100):
            trace.step(replace(STEP, began=float(second)))
        trace.close()
        with (logs / f"{chosen.name}-steps.{role}-0.json").open("a") as file:
            file.write('{"name": "step", "ts": 20')  # a worker that was killed leaves half a line
    cut_steps(logs, chosen, "it, chat, 0.6, round 1", 10.0, 9.5 + TAKES_STEPS)
    cut_steps(logs, chosen, "it, chat, 0.6, round 2", 60.0, 59.5 + TAKES_STEPS - 1)
    assert not steps_of(logs, chosen, "it, chat, 0.6, round 2") and not steps_of(logs, chosen, "another")
    found = steps_of(logs, chosen, "it, chat, 0.6, round 1")
    assert list(found) == list(chosen.roles)
    for file in found.values():
        began = [json.loads(line.rstrip(",\n"))["ts"] / 1e6 for line in file.read_text().splitlines()]
        assert began == [10.0 + second for second in range(TAKES_STEPS)]
    profile = tmp_path / "profile.json"
    sizes = dict.fromkeys(("kv_bytes", "layers", "max_num_seqs"), 8) | dict.fromkeys(
        ("kv_tokens", "max_model_len", "max_num_batched_tokens"), 512
    )
    profile.write_text(json.dumps({"model": "m", "cost": COST, **sizes}))
    named = ",".join(f"{role}={file}" for role, file in found.items())
    flags = ["simulate", "--workers", chosen.workers, "--profile", str(profile), "--role-steps", named]
    options = cli.make_parser().parse_args(flags)
    for steps in study_of(options, options.policy).plan.steps_of.values():
        assert [step.ratio for step in steps] == pytest.approx([2.0] * TAKES_STEPS)
