"""A process at the far end of a benchmark: it says what it is reached by, and on demand what CPU it has used.

Beside it stands what every transport is compared with: a copy within one process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import numpy as np


class FarProcess:
    """`python -m MODULE ARGUMENTS`: prints a line once it is up (`told`), then CPU seconds for each line it reads."""

    def __init__(self, module: str, *arguments: str):
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.told = self.process.stdout.readline()

    def cpu(self) -> float:
        """CPU seconds it has used."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End its input, and so the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


async def answer_cpu(told: object) -> None:
    """The far end itself: says `told`, then the CPU seconds it has used for each line of input, until that ends."""
    print(told, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


def memcpy_seconds(size: int) -> float:
    """The best of many copies of so many bytes, by one thread."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return min(once() for _ in range(9))
