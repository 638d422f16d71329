"""`millrace bench cpu` prints a table for each thing it measures, and writes the same figures."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bench.cpu_floor import MachineLimits, StepNeeds, decode_needs, screened_rows
from bench.cpu_kernels import Kinds, random_forward
from deploy.cli import main
from serving.kernels import cpu
from serving.kernels.cpu import Kind

needs_kernels = pytest.mark.skipif(cpu.shared_library() is None, reason="there is no compiler")
SHORT = ("--threads", "1", "--layers", "1", "--seconds", "0.01")


@needs_kernels
def test_it_measures_the_machine_and_each_kind_of_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", *SHORT, "--weights", "int8", "--json", str(tmp_path / "found.json")]) == 0
    found, told = orjson.loads((tmp_path / "found.json").read_bytes()), capsys.readouterr()
    assert "reads" in told.out and "decode, batch 32" in told.out and "prompt of 2,048" in told.out
    assert "batch 32 + prompt of 480" in told.out
    assert "bf16 weights" not in told.out and "steps with int8 weights" in told.err
    assert found["form"] in found["operations_per_second"] and found["threads"] == 1
    assert [len(found["steps"]), len(found["steps"]["int8"])] == [1, 7]
    assert all(0 < step["least"] <= step["median"] and step["floor"] > 0 for step in found["steps"]["int8"])
    assert all(0 < seconds < 10 for times in found["sampling"]["seconds"].values() for seconds in times)


def test_a_floor_is_what_takes_longer_of_reading_and_of_all_products() -> None:
    limits = MachineLimits(bandwidth=10e9, rates={Kind.INT8: 1000e9, Kind.BF16: 500e9})
    read = StepNeeds(100_000_000, {Kind.INT8: 2e9, Kind.BF16: 3e9})  # 10 ms; 2 and 6
    assert limits.floor(read) == pytest.approx(10e-3)
    multiplied = StepNeeds(50_000_000, {Kind.INT8: 2e9, Kind.BF16: 3e9})
    assert limits.floor(multiplied) == pytest.approx(2e-3 + 6e-3)  # kinds take turns, each at its own rate


@needs_kernels
@pytest.mark.parametrize("kv", [Kind.INT8, Kind.BF16, Kind.F32])
def test_a_decode_step_reads_and_multiplies_what_it_has(kv: Kind) -> None:
    """INT8 layers, a bfloat16 head, or half its bytes and twice its rows where it is screened, and attention."""
    kernels = cpu.load(threads=1)
    assert kernels is not None
    model, forward, kv_bytes = random_forward(kernels, Kinds(Kind.INT8, kv), layers=1)
    most = screened_rows(kernels.form)
    kernels.close()
    layer, head, context = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536, 49152 * 576, 10
    for count in (1, most, most + 1, 32):
        screened = count <= most
        expected = dict.fromkeys(Kind, 0.0)
        expected[Kind.INT8] = 2.0 * count * (layer + (2 * head if screened else 0))
        expected[Kind.BF16] = 0.0 if screened else 2.0 * count * head
        expected[Kind.F32 if kv is Kind.F32 else Kind.BF16] += 4.0 * count * 9 * 64 * context
        needs = decode_needs(model, forward, kv, kv_bytes, count, context)
        assert {**dict.fromkeys(Kind, 0.0), **needs.operations} == expected, count
        weights = layer + (1 if screened else 2) * head
        assert needs.read == pytest.approx(weights + count * context * kv_bytes, rel=2e-3), count


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
