"""What a fork server is told to run: it writes down what it has found, and ends as it is told.

`DESCRIPTOR DOES WORD…`, where DOES is `report`, or a number to exit with, or `wait` until the descriptor closes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def found() -> dict[str, Any]:
    """What distinguishes processes that were started in different ways."""
    handlers = {each.name: str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "command": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "arguments": sys.argv[1:],
        "environ": dict(os.environ),
        "folder": str(Path.cwd()),
        "input": Path("/proc/self/fd/0").readlink().name,
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "handlers": handlers,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": re.findall(r"^Umask:.*$", Path("/proc/self/status").read_text(), re.MULTILINE),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count() > 0,
        "file": sys.argv[0],
        "original": [word for word in sys.orig_argv if not word.isdigit()],
        "files": sorted(int(each.name) for each in Path("/proc/self/fd").iterdir() if each.exists()),
        "drawn": random.random(),
    }


def main() -> int:
    channel, does = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if does == "report":
        channel.sendall(json.dumps(found()).encode())
        return 0
    channel.sendall(b"!")
    if does == "wait":
        channel.recv(1)
        return 0
    return int(does)


if __name__ == "__main__":
    sys.exit(main())
