"""A child of a supervisor that writes down that it lives: `NAME FOLDER HOW`, where HOW is how it goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> int:
    name, folder, how = sys.argv[1:4]
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "obliging":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (Path(folder) / name).open("a") as log:
        log.write(
            f"{os.getpid()} {os.getsid(0)} {os.environ.get('MILLRACE_TOLD', '')} {os.environ.get('MILLRACE_OWN')}\n"
        )
    if how == "dies":
        return 3
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
