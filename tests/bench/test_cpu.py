"""`millrace bench cpu` prints a table for each thing it measures, and writes the same figures."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from deploy.cli import main
from serving.kernels import cpu

needs_kernels = pytest.mark.skipif(cpu.shared_library() is None, reason="there is no compiler")
SHORT = ("--threads", "1", "--layers", "1", "--seconds", "0.01")


@needs_kernels
def test_it_measures_the_machine_and_each_kind_of_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", *SHORT, "--weights", "int8", "--json", str(tmp_path / "found.json")]) == 0
    found, told = orjson.loads((tmp_path / "found.json").read_bytes()), capsys.readouterr()
    assert "reads" in told.out and "decode, batch 32" in told.out and "prompt of 2,048" in told.out
    assert "bf16 weights" not in told.out and "steps with int8 weights" in told.err
    assert found["form"] in found["operations_per_second"] and found["threads"] == 1
    assert [len(found["steps"]), len(found["steps"]["int8"])] == [1, 5]
    assert all(0 < step["least"] <= step["median"] and step["floor"] > 0 for step in found["steps"]["int8"])
    assert all(0 < seconds < 10 for times in found["sampling"]["seconds"].values() for seconds in times)


@needs_kernels
def test_a_form_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", *SHORT, "--form", "abacus"]) == 2
    assert "forms" in (told := capsys.readouterr().err) and "abacus" in told


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--threads", count) for count in ("0", "-1")),
        *(("--layers", count) for count in ("0", "-3")),
        *(("--seconds", seconds) for seconds in ("0", "-1", "nan", "inf")),
        ("--json", "/nowhere/found.json"),
    ],
)
def test_a_flag_that_cannot_be_is_named_before_anything_is_measured(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu", *SHORT, flag, value]) == 2
    told = capsys.readouterr()
    assert f"{flag} {value}" in told.err and not told.out
