"""Helper processes get our modules and none of our secrets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from serving.child_process import ROOT, helper_environ, module_command


def test_secrets_stay_here() -> None:
    """Before: keys of ours, and those of other services, went to what reads grammars."""
    kept = {"PATH": "/bin", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "2"}
    secret = {"MILLRACE_API_KEY": "a", "MILLRACE_CLUSTER_KEY": "b", "HF_TOKEN": "c", "AWS_SECRET_ACCESS_KEY": "d"}
    assert helper_environ(kept | secret) == {**kept, "PYTHONPATH": str(ROOT)}


def test_no_module_comes_from_the_working_directory(tmp_path: Path) -> None:
    """Before: a file of the name of one of Python's modules there was run instead."""
    for name in ("resource", "types", "serving"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')")
    environ = helper_environ({**os.environ, "PYTHONPATH": f"{os.pathsep}.{os.pathsep}/elsewhere"})
    assert environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}/elsewhere"
    ended = subprocess.run(
        [*module_command("serving.malloc")], cwd=tmp_path, env=environ, capture_output=True, check=False, timeout=30
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
