"""A process that leaves, and nobody reads what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LEAVES = """
import sys, time
from pathlib import Path
from deploy.runtime.signals import leave_at_once_on_signals
from serving.temporary import temporary_folder
leave_at_once_on_signals()
made = temporary_folder(Path(sys.argv[1]))
made.__enter__()
print("ready", flush=True)
time.sleep(60)
"""


def test_it_leaves_no_folder_behind_though_its_reader_is_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", LEAVES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, text=True) as process:
        os.close(write)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert len(list(tmp_path.iterdir())) == 1
            os.close(read)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
