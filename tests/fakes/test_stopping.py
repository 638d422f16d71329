"""A process that was stopped does nothing more, whatever threads it has."""

from __future__ import annotations

import subprocess
import sys

from tests.fakes.stopping import stands_still, stop

SPINNING = """
import sys, threading
def spin():
    while True:
        sys.stdout.write("x")
        sys.stdout.flush()
for _ in range(8):
    threading.Thread(target=spin, daemon=True).start()
threading.Event().wait()
"""


def test_no_thread_goes_on_once_its_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", SPINNING], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.read(1) == b"x"
            assert not stands_still(process.pid)
            stop(process.pid)
            assert stands_still(process.pid)
        finally:
            process.kill()
