"""Runs `millrace` as a child that dies with its actor: what has lost its reservation may not keep cores or a GPU.

`python -m deploy.on_ray.tied PARENT ARGUMENTS…`. It knows nothing of Ray.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to its parent, and become the `millrace` command."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we were bound to it
        sys.exit(1)
    runpy.run_module("deploy.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
