"""A process at the far end of a benchmark: it says what it is reached by, and on demand what CPU it has used."""

from __future__ import annotations

import subprocess
import sys


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
