"""Plans new placements in a process of its own: seconds of Python would hold up the steps of a rank beside them.

Arrays go there and come back as bytes. `python -m serving.expert_parallel.planner` is that process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from serving.child_process import helper_environ, module_command
from serving.expert_parallel.replanning import BalancePolicy, LayerCommit, replanned
from serving.expert_parallel.stages import SlotChange
from serving.model.expert_balance import ExpertPlacement

PLANNING_SECONDS = 300.0
LOOK_SECONDS = 0.1
NICE = 10  # the process gives way to those that serve


def planned(
    placements: Sequence[ExpertPlacement],
    loads: NDArray[np.float64],
    policy: BalancePolicy,
    look: Callable[[], object] = lambda: None,
) -> bytes:
    """The commits of `replanned`, for loads [L, E], as `unpacked` reads them. Raises SubprocessError.

    `look` is called every LOOK_SECONDS; what it raises ends the process.
    """
    words = json.dumps({"experts": placements[0].experts, "policy": asdict(policy)}).encode()
    slots, told = np.array([one.slots for one in placements]), np.frombuffer(words, dtype=np.uint8)
    given: bytes | None = _joined(slots, loads, told)
    command = ("nice", "-n", str(NICE), *module_command("serving.expert_parallel.planner"))
    process = subprocess.Popen(  # noqa: S603 - our own module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=helper_environ(os.environ),
    )
    until = time.monotonic() + PLANNING_SECONDS
    answer: bytes | None = None
    with process:
        try:
            while answer is None:
                try:
                    answer, _ = process.communicate(given, LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= until:
                        raise
                    given = None  # it is on its way
                    look()
        finally:
            process.kill()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return answer


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
