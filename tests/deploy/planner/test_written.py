"""What a plan reads and writes: questions from files and flags, the placement file of every platform, reports."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.placement import compose, helm
from deploy.placement.image import ImageSource
from deploy.placement.reader import read_placement
from deploy.planner.answer import PlannedPlacement
from deploy.planner.asking import read_question
from deploy.planner.command import add_arguments
from deploy.planner.machines import Machines
from deploy.planner.placements import CandidatePlacement, InstanceShape, aggregated, disaggregated
from deploy.planner.rate_search import FoundGoodput
from deploy.planner.written import placement_file

HAS_CHARTS = importlib.util.find_spec("matplotlib") is not None
SMALL = [
    "--devices-per-node",
    "2",
    "--tp",
    "1,2",
    "--requests",
    "60",
    "--seconds",
    "0",
    "--max-num-batched-tokens",
    "512",
]
FILE = """
[model]
name = "mine"
layers = 32
heads = 32
kv_heads = 8
hidden = 4096
weights = 16e9
kv_bytes = 131072

[hardware]
name = "h100-80g"
nodes = 2
devices_per_node = 4

[traffic]
prompt_mean = 800
output_mean = 100
rate = 5

[objectives]
ttft_ms = 300
tpot_ms = 40
attain = "each"

[search]
tp = [1, 2]
links = "slow"
"""


@pytest.mark.parametrize(
    "placement",
    [
        aggregated(InstanceShape(2), 3, 1024),
        disaggregated(InstanceShape(2), 2, InstanceShape(1), 3, 2048),
        disaggregated(InstanceShape(4, 2), 1, InstanceShape(4, 2), 1, 2048, units=2),
    ],
    ids=str,
)
def test_the_placement_file_is_what_was_planned(placement: CandidatePlacement) -> None:
    text = placement_file(PlannedPlacement(placement, FoundGoodput(), 1.0), "/models/opt", Machines())
    plan = read_placement(text)
    assert plan.ray.sets == placement.units
    for group, planned in zip(plan.workers, placement.groups, strict=True):
        assert (group.kind, group.count) == (planned.role, planned.count * placement.units)
        assert group.settings.get("tensor_parallel_size", 1) == planned.shape.tp
        assert group.settings.get("pipeline_parallel_size", 1) == planned.shape.pp
        assert group.settings.get("max_num_batched_tokens", 0) == (planned.budget if planned.role != "decode" else 0)
    assert compose.render(plan, ImageSource(name="example.org/millrace:1.0"))
    assert helm.render(plan, ImageSource(name="example.org/millrace:1.0"))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "question.toml"
    path.write_text(FILE)
    found = read_question(parsed(str(path), "--tpot-ms", "50", "--tp", "2"))
    assert (found.model.name, found.model.measured, found.machines.nodes) == ("mine", {}, 2)
    assert (found.space.tp, found.space.free, found.space.tied) == ((2,), False, True)
    assert (found.goal.joint, found.least_rate) == (False, 5)
    (kind,) = found.load.traffic.classes
    assert (kind.ttft_ms, kind.tpot_ms, kind.prompt.mean) == (300, 50, 800)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-9"], "model 'gpt-9' is none of opt-13b"),
        (["--hardware", "abacus"], "hardware 'abacus' is none of a100-80g"),
        (["--tp", "1,x"], "tp '1,x': give whole numbers"),
        (["--attainment", "1.5"], "attainment 1.5"),
        (["--nodes", "0"], "nodes of the hardware must be a whole number above 0, not 0"),
        (["--model", "opt-66b", "--devices-per-node", "1"], "no worker fits: workers of TP1: does not fit memory"),
        (["--workload", "nothing"], "there is no workload 'nothing'"),
        (["--lengths", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_asked_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        read_question(parsed(*arguments))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"), [("[modle]\n", "'modle'"), ("[search]\ntpp = 1\n", "[search] has no 'tpp'")]
)
def test_unknown_keys_of_a_file_are_errors(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "question.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_question(parsed(str(path)))
    assert words in str(error.value)


def test_the_command_plans_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "plan"
    asked = [
        *SMALL,
        "--workload",
        "chat",
        "--ttft-ms",
        "300",
        "--tpot-ms",
        "60",
        "--finalists",
        "0",
        "--processes",
        "0",
    ]
    report = [] if HAS_CHARTS else ["--no-report"]
    assert main(["plan", *asked, "--estimates", "6", "--output", str(folder), *report]) == 0
    told = capsys.readouterr().out
    assert "opt-13b on 1 × 2 a100-80g, chat: TTFT 300 ms, TPOT 60 ms, 90% of both at once" in told
    assert "isaggregate: " in told or "Either will do: " in told
    assert read_placement((folder / "placement.toml").read_text()).workers
    if HAS_CHARTS:
        page = (folder / "plan.html").read_text()
        assert page.count("<svg") == 4 and "src=" not in page and "<link" not in page and "@import" not in page
        assert all(words in page for words in ("Attainment by rate", "Left out", "requests/s", "placement.toml"))
        assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *asked, "--estimates", "6", "--output", str(folder), "--resume", "--no-report"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told.splitlines()[-1]
