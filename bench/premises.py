"""What the servers of a measurement compute with: this machine's cores, or a pace that no other process changes.

It makes what a paced server needs, and knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.random_folder import write_folder
from serving.step_cost import StepCost

VARIABLE, LAGS = "BENCH_PACE", "BENCH_PACE_LAGS"  # of scripts.paced
# Computes 512 tokens within a fifth of what STEADY says of them; and what a worker guesses of such a model before its
# first step is in about the proportions of STEADY. Another guess would be unlearned in thousands of steps only.
SHAPE = "paced"
# Steps beside which what Python, HTTP and gRPC take is little, on a busy machine too: a prompt of 256 tokens takes
# 0.4 s, a token of six sequences 46 ms.
STEADY = StepCost(fixed=0.03, token=1.4e-3, pair=6e-7, sequence=4e-4, context=2e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Premises:
    """`module` has the command `serve`; `model` is a folder, None: the default model. `pace`: what a step lasts.

    Into the folder `lags` paced workers write how much longer it did.
    """

    module: str = "deploy.cli"
    model: Path | None = None
    pace: StepCost | None = None
    lags: Path | None = None


@contextmanager
def premises(pace: StepCost | None) -> Iterator[Premises]:
    """Those of servers whose steps last as `pace` says; None: as long as they take on this machine.

    Paced workers keep what they learn in a folder of their own, which goes with the model at the end.
    """
    if pace is None:
        yield Premises()
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        write_folder(folder / "model", SHAPE, "bfloat16", torch.device("cpu"))
        lags = folder / "lags"
        lags.mkdir()
        own = {VARIABLE: json.dumps(asdict(pace)), LAGS: str(lags), "XDG_CACHE_HOME": str(folder / "cache")}
        with environment(own):
            yield Premises(module="scripts.paced", model=folder / "model", pace=pace, lags=lags)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables for the processes that are started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
