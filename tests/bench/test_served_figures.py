"""Overload and predictions of a served fleet: what is read from answers, tables and plots, and one real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import overload, prediction
from bench.contenders import NO_SHEDDING
from bench.endpoint import ServerError
from bench.own_server import OwnServer, descendants
from bench.prediction import Explained, errors_table, explained_of
from bench.sitting import flags_in
from bench.sse import Outcome
from bench.surge import Arrived, LoadSpan, timed_in_spans
from serving.service_config import read_service_classes
from tests.tiny import tiny_llama

SPANS = [LoadSpan(name=name, seconds=20, rates={"interactive": 2.0, "batch": 1.0}) for name in ("before", "surge")]
SPANS += [LoadSpan(name="after", seconds=20, rates={"interactive": 2.0, "batch": 1.0})]


def answered() -> overload.Observed:
    """All in time, but for the interactive requests of the surge, of which each second one is late."""
    found = []
    for number, one in enumerate(timed_in_spans(overload.KINDS, SPANS, seed=0)):
        refused = one.kind.name == "batch" and 20 <= one.at < 40
        late = one.kind.name == "interactive" and 20 <= one.at < 40 and number % 2
        outcome = Outcome(prompt_tokens=9, max_tokens=2, kind=one.kind.name, scheduled=one.at, sent=one.at, reported=2)
        outcome.first, outcome.finished = one.at + (2.0 if late else 0.2), one.at + 2.1
        outcome.last = outcome.first + 0.02
        if refused:
            outcome.fail("HTTP 429")
        found.append(Arrived(one.at, outcome))
    return overload.Observed(
        arrived=found, spent=[], memory=[[(at / 2, 1 << 30) for at in range(120)] + [(60.0, 3 << 29)]]
    )


def test_the_verdict_of_an_overload() -> None:
    found = overload.verdict(answered(), SPANS)
    assert found["interactive_before"] == 1.0 and found["batch_unanswered"] == 1.0
    assert found["interactive_during"] == found["interactive_kept"] == pytest.approx(0.5, abs=0.15)
    assert found["recovery_seconds"] == 0.0
    assert (found["memory_before"], found["memory_peak"], found["memory_end"]) == (1 << 30, 3 << 29, 3 << 29)
    text = overload.markdown(answered(), SPANS, 4.0, "title")
    assert "| batch       | surge  |" in text and "1,536 MiB" in text
    panels = ElementTree.fromstring(overload.drawing(answered(), SPANS, "title")).findall(
        "{http://www.w3.org/2000/svg}g"
    )
    assert len(panels) == 3


def told(prefill: str = "mixed-0", **changes: Any) -> dict[str, Any]:
    predicted = {"queue": 0.1, "prefill": 0.2, "transfer": 0.0, "ttft": 0.33, "tpot": 0.03, "step": 0.01}
    predicted["usual_tpot"] = 0.02
    actual = {"queue": 0.1, "prefill": 0.1, "transfer": None, "ttft": 0.3, "tpot": 0.025}
    attempt = {"prefill": prefill, "decode": "mixed-0", "predicted": predicted, "actual": actual} | changes
    return {"id": "cmpl-1", "sequences": [{"attempts": [attempt]}]}


def test_a_prediction_is_read_from_what_the_server_explains() -> None:
    found = explained_of(told(), 3.0, "chat")
    assert found is not None and found.placement == "mixed-0"
    assert found.error("ttft") == pytest.approx(0.1) and found.error("tpot") == pytest.approx(0.2)
    assert found.error("transfer") is None and found.predicted["mean_tpot"] == 0.03
    apart = explained_of(told("prefill-0"), 3.0, "chat")
    assert apart is not None and apart.placement == "prefill-0 → mixed-0"
    assert explained_of(told(predicted=None), 3.0, "chat") is None
    assert explained_of({"sequences": [{"attempts": []}]}, 3.0, "chat") is None


def test_errors_are_told_by_span_and_kind() -> None:
    spans = [LoadSpan(name=name, seconds=60, rates={}) for name in ("steady", "changed")]
    found = [explained_of(told(), float(at), "chat") for at in range(120)]
    explained = [one for one in found if one is not None]
    explained += [Explained(at=105.0, kind="long", predicted={"ttft": 1.0}, actual={"ttft": 2.0}, placement="")]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in errors_table(explained, spans).splitlines()[2:]
    ]
    assert rows[0] == ["first 20 s", "all", "20", *(figures := rows[0][3:])]
    assert rows[2] == ["steady", "all", "40", *figures] and rows[4] == ["steady, first half", "all", "20", *figures]
    assert figures == ["10.0%, 10%, +10.0%", "0.0%", "20.0%, 20%, -20.0%", "0.0%"]
    assert rows[-1] == ["changed, second half", "long", "1", "50.0%, 50%, -50.0%", "0.0%", "—", "—"]
    assert [row[2] for row in rows if row[0].startswith("5 s") and row[1] == "chat"] == ["5"]
    drawing = ElementTree.fromstring(prediction.drawing(explained, spans, "a & b"))
    assert len(drawing.findall("{http://www.w3.org/2000/svg}g")) == 4


def test_the_class_file_of_the_ablation_is_written_where_it_is_named(tmp_path: Path) -> None:
    flags = flags_in(tmp_path / "logs", ["--service-classes", NO_SHEDDING])
    assert not read_service_classes(flags[1])["interactive"].shed
    assert flags_in(tmp_path / "none", ["--mixed", "2"]) == ["--mixed", "2"] and not (tmp_path / "none").exists()


@pytest.mark.slow
async def test_a_real_server_is_started_explained_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny_llama(tmp_path / "tiny"), tmp_path / "found"
    flags = f"{model} --kernels torch --dtype float32"
    args = prediction.arguments().parse_args(["--serve-flags", flags, "--seconds", "3", "--capacity", "6"])
    args.out = out
    before = set(descendants(1))
    await prediction.measure_predictions(args)
    assert " 0 requests without a prediction" in capsys.readouterr().out
    assert out.with_suffix(".svg").exists() and out.with_suffix(".json").exists()
    left = [pid for pid in set(descendants(1)) - before if str(model) in _command(pid)]
    assert left == []
    with pytest.raises(ServerError, match="no-such-flag"):
        async with OwnServer(["--no-such-flag"], workers=[], log=tmp_path / "log"):
            raise AssertionError("it cannot have started")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
