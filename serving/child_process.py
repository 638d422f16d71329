"""How helper processes of ours are started: the command that runs one of our modules, and the environment it gets.

Python alone would look for modules in the working directory first, where anything may lie; and a process that reads
what clients send needs none of the secrets in our environment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import serving

ROOT = Path(serving.__file__).parent.parent
# Exit statuses of a process that somebody ended, or its host for want of memory, and not what it did.
ENDED_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
# What a process needs to find its files, to speak, and to know how many threads it may have.
NEEDED = frozenset(
    {
        *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    }
)


def module_command(module: str) -> tuple[str, ...]:
    """What runs this module of ours, whatever the working directory holds."""
    return (sys.executable, "-P", "-m", module)


def import_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH for a child: our own folder first, then what is there already but for the working directory."""
    others = environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join((str(ROOT), *(folder for folder in others if os.path.isabs(folder))))  # noqa: PTH117


def helper_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """For a process that reads what clients send: of our environment what is NEEDED, the locale, and `import_path`."""
    known = {name: value for name, value in environ.items() if name in NEEDED or name.startswith("LC_")}
    return known | {"PYTHONPATH": import_path(environ)}


class Child(Protocol):
    """What is told of a child process."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...


def signal_child(process: Child, number: signal.Signals) -> None:
    """Send a signal to a child that runs.

    asyncio's own methods ask first whether it has ended, and take its exit status from the event loop if it just has:
    that tells 255 then.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
