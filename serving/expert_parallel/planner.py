"""Plans new placements in a process of its own: seconds of Python would hold up the steps of a rank beside them.

Arrays go there and come back as bytes. `python -m serving.expert_parallel.planner` is that process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from serving.child_process import helper_environ, module_command
from serving.expert_parallel.replanning import BalancePolicy, LayerCommit, replanned
from serving.expert_parallel.stages import SlotChange
from serving.model.expert_balance import ExpertPlacement

PLANNING_SECONDS = 300.0
NICE = 10  # the process gives way to those that serve


def planned(placements: Sequence[ExpertPlacement], loads: NDArray[np.float64], policy: BalancePolicy) -> bytes:
    """The commits of `replanned`, for loads [L, E], as `unpacked` reads them. Raises SubprocessError."""
    words = json.dumps({"experts": placements[0].experts, "policy": asdict(policy)}).encode()
    given = _joined(np.array([one.slots for one in placements]), loads, np.frombuffer(words, dtype=np.uint8))
    command = ("nice", "-n", str(NICE), *module_command("serving.expert_parallel.planner"))
    done = subprocess.run(  # noqa: S603 - our own module
        command, input=given, capture_output=True, timeout=PLANNING_SECONDS, env=helper_environ(os.environ), check=True
    )
    return done.stdout


def packed(commits: Sequence[LayerCommit]) -> bytes:
    """As an array [N, 5] int64 of commit number, layer, rank, slot, expert."""
    rows = [
        (number, commit.layer, change.rank, change.slot, change.expert)
        for number, commit in enumerate(commits)
        for change in commit.stage
    ]
    return np.array(rows, dtype=np.int64).tobytes()


def unpacked(stored: bytes) -> list[LayerCommit]:
    rows = np.frombuffer(stored, dtype=np.int64).reshape(-1, 5).tolist()
    return [
        LayerCommit(layer, tuple(SlotChange(*row[2:]) for row in stage))
        for (_, layer), stage in groupby(rows, key=lambda row: (row[0], row[1]))
    ]


def _joined(*arrays: NDArray[np.generic]) -> bytes:
    stream = io.BytesIO()
    for array in arrays:
        np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def main() -> None:
    stream = io.BytesIO(sys.stdin.buffer.read())
    slots, loads, words = (np.load(stream, allow_pickle=False) for _ in range(3))
    told = json.loads(words.tobytes())
    placements = [ExpertPlacement(tuple(map(tuple, layer)), told["experts"]) for layer in slots.tolist()]
    sys.stdout.buffer.write(packed(replanned(placements, loads.tolist(), BalancePolicy(**told["policy"]))))


if __name__ == "__main__":
    main()
