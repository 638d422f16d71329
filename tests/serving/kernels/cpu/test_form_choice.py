"""The form that computes quickest is taken, measured once for a CPU and a library, and kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest
import torch

from kvcache.memory.device import DeviceKV
from serving.config import CPU_FORMS, EngineConfig
from serving.forward import choose
from serving.forward.choose import make_forward
from serving.kernels import cpu
from serving.kernels.cpu import build, extension, form_choice
from serving.loader.loading import load
from tests.serving.kernels.cpu.conftest import FORMS
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(len(FORMS) < 2, reason="this CPU runs one form of the kernels, or there is no compiler")


class Measured:
    """What stands in for the measurement: seconds by form, and how often they were asked for."""

    def __init__(self, seconds: Mapping[str, float]):
        self.seconds, self.times = dict(seconds), 0

    def __call__(self, _library: object, candidates: Sequence[str], _threads: int) -> dict[str, float]:
        self.times += 1
        return {form: self.seconds[form] for form in candidates}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(form_choice, "cache_folder", lambda: folder)
    return folder


def measured(monkeypatch: pytest.MonkeyPatch, first: float, second: float) -> Measured:
    found = Measured({FORMS[0]: first, FORMS[1]: second})
    monkeypatch.setattr(form_choice, "time_forms", found)
    return found


def chosen(rivals: Sequence[str] = FORMS[:2]) -> str:
    library = cpu.shared_library()
    assert library is not None
    return form_choice.quickest_form(library, 1, rivals)


@pytest.mark.parametrize(("first", "second", "at"), [(1.0, 2.0, 0), (1.0, 0.5, 1), (1.0, 0.99, 0), (1.0, 1.0, 0)])
def test_the_quickest_is_taken_and_of_equals_the_first(
    monkeypatch: pytest.MonkeyPatch, first: float, second: float, at: int
) -> None:
    measured(monkeypatch, first, second)
    assert chosen() == FORMS[at]


def test_it_is_measured_once_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = measured(monkeypatch, 1.0, 0.5)
    with caplog.at_level(logging.INFO):
        assert [chosen(), chosen()] == [FORMS[1]] * 2
    assert found.times == 1 and f"form {FORMS[1]}: bfloat16 products 2.00× as fast as of {FORMS[0]}" in caplog.text


def test_another_cpu_is_measured_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 1.0, 0.5)
    chosen()
    monkeypatch.setattr(form_choice, "cpu_name", lambda: "another")
    found.seconds[FORMS[1]] = 3.0
    assert chosen() == FORMS[0] and found.times == 2
    monkeypatch.setattr(form_choice, "cpu_name", build.cpu_name)
    assert chosen() == FORMS[1] and found.times == 2


ODD: list[object] = [[], 3, {"x": 1}, {build.cpu_name(): dict.fromkeys(FORMS, 0.0)}, {build.cpu_name(): {}}]


@pytest.mark.parametrize("odd", [b"", b"{", b"\xff", *map(orjson.dumps, ODD)])
def test_what_cannot_be_believed_is_measured_anew(monkeypatch: pytest.MonkeyPatch, cache: Path, odd: bytes) -> None:
    found = measured(monkeypatch, 1.0, 0.5)
    chosen()
    (file,) = cache.glob("*-forms.json")
    file.write_bytes(odd)
    assert chosen() == FORMS[1] and found.times == 2
    assert chosen() == FORMS[1] and found.times == 2


def test_it_needs_no_folder_to_keep_it_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(form_choice, "cache_folder", lambda: tmp_path / "file" / "below")
    found = measured(monkeypatch, 1.0, 0.5)
    assert chosen() == FORMS[1] == chosen() and found.times == 2


def test_forms_that_compute_alike_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 1.0, 0.5)
    assert chosen(FORMS[1:]) == FORMS[0] == chosen(FORMS[:1]) and found.times == 0


def test_the_measurement_finds_plain_code_slow() -> None:
    library = cpu.shared_library()
    assert library is not None
    seconds = form_choice.time_forms(library, (FORMS[0], "plain"), 1)
    assert seconds["plain"] > 1.5 * seconds[FORMS[0]] > 0


def test_every_form_can_be_named() -> None:
    assert set(CPU_FORMS) == {"auto", *build.X86_FORMS, "plain"}


def test_a_worker_computes_with_the_form_it_is_told_and_deterministic_ones_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_llama(tmp_path / "model")
    model = load(tmp_path / "model", "float32")
    planes = DeviceKV(model.spec.kv_layers("float32"), 4, 16).planes
    asked: list[int] = []
    monkeypatch.setattr(cpu, "quickest_form", lambda *_: asked.append(1) or FORMS[1])

    def form(**settings: object) -> str:
        made = make_forward(model, planes, dataclasses.replace(EngineConfig(threads=1), **settings), 64)
        return str(made.form)

    assert form() == f"cpu-{FORMS[1]}" and len(asked) == 1
    assert form(deterministic=True) == f"cpu-{FORMS[0]}" and len(asked) == 1
    assert form(cpu_form="plain") == "cpu-plain" and len(asked) == 1
    missing = next((name for name in CPU_FORMS[1:] if name not in FORMS), None)
    if missing is not None:
        with pytest.raises(ValueError, match=f"--cpu-form: this CPU runs the forms {FORMS[0]}.*, not {missing}"):
            form(cpu_form=missing)
    torch.set_num_threads(1)


@pytest.mark.parametrize("refused", [True, False])
def test_amx_that_goes_unused_is_told_once_unless_the_form_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    library = cpu.shared_library()
    if library is None or not hasattr(library, "millrace_linear_avx512_amx"):
        pytest.skip("no compiler that knows AMX")
    monkeypatch.setattr(extension, "forms", lambda _: ["plain"] if refused else ["avx512_amx", "plain"])
    monkeypatch.setattr(extension, "cpu_has_amx", lambda: True)
    monkeypatch.setattr(cpu, "quickest_form", lambda *_: "plain")
    choose._tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, choose.log.name):
        for form in ("plain", "auto", "auto"):
            kernels = choose.cpu_kernels(EngineConfig(cpu_form=form), 1)
            assert kernels is not None
            kernels.close()
            assert len(caplog.records) == (refused and form == "auto")
    reason = "the system refuses this process its tiles"
    assert all(
        f"AMX goes unused, INT8 and bfloat16 prompts may take three times as long: {reason}" in line.getMessage()
        for line in caplog.records
    )
    if refused:
        with pytest.raises(ValueError, match=f"--cpu-form: this CPU runs the forms plain, not avx512_amx: {reason}"):
            choose.cpu_kernels(EngineConfig(cpu_form="avx512_amx"), 1)
        with pytest.raises(ValueError, match=r"not avx2$"):
            choose.cpu_kernels(EngineConfig(cpu_form="avx2"), 1)
        choose._tell_once.cache_clear()
        caplog.clear()
        deterministic = choose.cpu_kernels(EngineConfig(deterministic=True), 1)
        assert deterministic is not None and len(caplog.records) == 1
        deterministic.close()
