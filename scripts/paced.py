"""`millrace serve` whose workers take as long for a step as a device of a given step cost: what each holds is its own.

    BENCH_PACE='{"fixed": 0.018, "token": 0.0017}' python -m scripts.paced serve MODEL --prefill 2 --decode 1 …

Router, gRPC, leases, schedulers, KV and its way are those of any server, in processes of their own; a step computes
the model, a small one, and then sleeps. So workers do not take each other's cores, as those on one machine do. Where
BENCH_PACE_LAGS names a folder, each worker writes there how much longer its steps lasted than they were to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from torch import Tensor

from deploy.children import alike
from deploy.cli import children_of, make_parser
from deploy.runtime.settings import read_settings
from deploy.runtime.signals import leave_at_once_on_signals
from deploy.serve import children_below, serve_embedded, serve_front
from deploy.worker.computing import forward_of
from deploy.worker.process import WorkerProcess
from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.config import EngineConfig
from serving.forward.forward import Forward
from serving.forward.layer_events import LayerDone
from serving.loader.loading import LoadedModel
from serving.log_lines import setup_of
from serving.logs import setup_logging
from serving.messages import Role
from serving.model.decoder import Planes
from serving.step_cost import StepCost, StepLoad

T = TypeVar("T")
PACE = "BENCH_PACE"  # the environment's variable with a step cost as JSON
LAGS = "BENCH_PACE_LAGS"  # and the one with a folder
LAG_SECONDS = 1.0  # told of in a line


class LagLog:
    """How much longer steps lasted than they were to: a line of JSON in `file` for about each second of steps.

    `at` is its time since the epoch; `paced`, `late` and `worst` are seconds.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.time):
        self.file, self.clock = file, clock
        self._told = clock()
        self._steps, self._paced, self._late, self._worst = 0, 0.0, 0.0, 0.0

    def add(self, paced: float, late: float) -> None:
        """A step that was to last `paced` seconds, and lasted `late` longer."""
        self._steps, self._paced, self._late = self._steps + 1, self._paced + paced, self._late + late
        self._worst, now = max(self._worst, late), self.clock()
        if now - self._told < LAG_SECONDS:
            return
        line = {"at": now, "steps": self._steps, "paced": self._paced, "late": self._late, "worst": self._worst}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._told, self._steps, self._paced, self._late, self._worst = now, 0, 0.0, 0.0, 0.0


class PacedForward:
    """A Forward whose steps last as long as `cost` says, or as `inner` takes where that is longer."""

    def __init__(
        self,
        inner: Forward,
        cost: StepCost,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        log: LagLog | None = None,
    ):
        self.inner, self.cost, self.clock, self.sleep, self.log = inner, cost, clock, sleep, log
        self.form = inner.form

    def over(self, planes: Sequence[Planes]) -> PacedForward:
        return PacedForward(self.inner.over(planes), self.cost, self.clock, self.sleep, self.log)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._paced(batch, partial(self.inner.logits, batch, layer_done))

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._paced(batch, partial(self.inner.greedy, batch, layer_done))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return self._paced(batch, partial(self.inner.greedy_and_logits, batch, layer_done, rows))

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._paced(batch, partial(self.inner.hidden, batch, layer_done))

    def _paced(self, batch: RaggedBatch, compute: Callable[[], T]) -> T:
        seconds = self.cost.seconds(load_of(batch))
        due = self.clock() + seconds
        found = compute()
        self.sleep(max(0.0, due - self.clock()))
        if self.log is not None:
            self.log.add(seconds, max(0.0, self.clock() - due))
        return found


def load_of(batch: RaggedBatch) -> StepLoad:
    """What a step of this batch computes."""
    rows = zip(batch.query_lens, batch.context_lens_list, strict=True)
    return sum((StepLoad.of(context - count, count) for count, context in rows), StepLoad())


def paced_forward(
    cost: StepCost, model: LoadedModel, device_kv: DeviceKV, config: EngineConfig, limit: int
) -> PacedForward:
    """Raises ValueError as `forward_of` does."""
    folder = os.environ.get(LAGS)
    log = LagLog(Path(folder) / f"{os.getpid()}.jsonl") if folder else None
    return PacedForward(forward_of(model, device_kv, config, limit), cost, log=log)


def main(arguments: Sequence[str] | None = None) -> int:
    """`serve`, or one of its workers; the process's exit code. Raises ValueError, KeyError without BENCH_PACE."""
    given: dict[str, Any] = vars(make_parser().parse_args(arguments))
    cost, settings = StepCost(**json.loads(os.environ[PACE])), read_settings(given)
    command = given["command"]
    setup_logging(setup_of(settings.logs, command, settings.cluster.worker_name or command))
    leave_at_once_on_signals()
    make_forward = partial(paced_forward, cost)
    if command == "serve" and not children_of(given):
        return uvloop.run(serve_embedded(settings, make_forward))
    if command == "serve":
        children = alike(children_of(given), given["kvcache"], settings)
        return uvloop.run(serve_front(settings, children, partial(children_below, module="scripts.paced")))
    return uvloop.run(WorkerProcess(Role(command), settings, parent=given["parent"], make_forward=make_forward).run())


if __name__ == "__main__":
    sys.exit(main())
