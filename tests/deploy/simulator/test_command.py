"""The command: what it refuses, what it prints, and that a search ends at a rate that attains."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from deploy import cli
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.command import SimulationProgress, profiles_of, roles_of, variation
from deploy.simulator.outcomes import OutcomeColumns, figures
from deploy.simulator.profiles import PROFILES, profile_of
from deploy.simulator.report import PolicyResult, bar, comparison, goodput_line
from deploy.simulator.step_records import VariedStep
from serving.messages import Role
from tests.deploy.simulator.test_hardware import DESCRIPTION
from tests.deploy.simulator.test_outcomes import outcome

QUICK = ("simulate", "--jobs", "1", "--requests", "20", "--seeds", "2", "--workers", "mixed=1")


def test_rates_are_shown_one_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert cli.main([*QUICK, "--rate", "4,2", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines() if "%" in line and "──" not in line]
    assert [line[0] for line in lines] == ["2.00", "4.00"]
    assert "TTFT ≤" in printed.out and "real time" in printed.out and "goodput:" not in printed.out
    assert printed.err == "", "a progress bar is for terminals"
    rates = orjson.loads(file.read_bytes())["policies"][0]["rates"]
    assert [rate["offered"] for rate in rates] == [40, 40]


def test_requests_that_only_warm_a_cache_are_left_out_of_the_figures(tmp_path: Path) -> None:
    """The first computes the text that the second then has, and is in no figure."""
    trace, out = tmp_path / "a.csv", tmp_path / "out.json"
    lines = [
        "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens,counted",
        "0,1500,1,a,1480,{}",
        "9,1500,2,a,1480,true",
    ]
    found = []
    for counted in ("true", "false"):
        trace.write_text("\n".join(lines).format(counted))
        flags = ("--trace", str(trace), "--noise", "0", "--json", str(out))
        assert cli.main(["simulate", "--workers", "mixed=1", "--seeds", "1", *flags]) == 0
        (rate,) = orjson.loads(out.read_bytes())["policies"][0]["rates"]
        found.append((rate["offered"], rate["ttft_p90"]))
    (both, first), (one, second) = found
    assert (both, one) == (2, 1) and second < 0.5 * first


def test_a_search_ends_at_a_rate_that_attains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert (
        cli.main(
            [
                *QUICK,
                "--rate-tolerance",
                "0.3",
                "--first-rate",
                "16",
                "--policy",
                "least_loaded,prefix_aware",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    assert "goodput: " in capsys.readouterr().out
    for found in orjson.loads(file.read_bytes())["policies"]:
        shares = {rate["rate"]: rate["attainment"] for rate in found["rates"]}
        assert shares[found["goodput"]] >= 0.9
        assert any(share < 0.9 for rate, share in shares.items() if rate > found["goodput"])


@pytest.mark.parametrize(
    "wrong",
    [
        ("--workers", "mixed"),
        ("--workers", "router=1"),
        ("--workers", "prefill=1"),
        ("--workers", "decode=2"),
        ("--policy", "nobody"),
        ("--requests", "1"),
        ("--burstiness", "0"),
        ("--bandwidth", "0"),
        ("--rate", "fast"),
        ("--rate", "1,"),
        *(
            (flag, number)
            for flag in ("--rate", "--first-rate", "--noise", "--heartbeat-interval", "--ttft-ms", "--tpot-ms")
            for number in ("-1", "nan", "inf")
        ),
        ("--rate", "0"),
        ("--rate", "1e-300"),
        ("--heartbeat-interval", "0"),
        ("--tpot-ms", "0"),
        ("--bandwidth", "nan"),
        ("--front-ms", "-1"),
        *(("--role-steps", text) for text in ("router=steps.json", "prefill", "prefill=", "mixed=steps.json")),
        *(("--role-noise", text) for text in ("router=0.1", "prefill", "prefill=nan", "decode=4")),
        ("--message-ms", "nan"),
        ("--commit-ms", "inf"),
        ("--burstiness", "nan"),
        ("--attainment", "nan"),
        ("--attainment", "1.1"),
        ("--rate-tolerance", "nan"),
        ("--max-tokens", "0"),
        ("--max-num-batched-tokens", "0"),
        ("--max-num-seqs", "0"),
        ("--num-kv-blocks", "0"),
        ("--seeds", "0"),
        ("--workers", "mixed=0"),
        ("--workers", "mixed=²"),
        ("--role-profiles", "prefill=nobody"),
        ("--role-profiles", "prefill=a100-opt66b-tp4"),
        ("--role-profiles", "router=a100-opt13b"),
        ("--profile", "nobody"),
        ("--prompt-tokens", "many"),
        ("--prompt-tokens", "0"),
        ("--output-tokens", "64:-1"),
        ("--jobs", "-1"),
        ("--json", "/nowhere/out.json"),
        ("--prompt-tokens", "8000"),
        ("--output-tokens", "1e9"),
    ],
)
def test_what_cannot_be_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--rate", "1", *wrong]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("millrace: ") and wrong[0] in printed.err and not printed.out


def test_workers_and_their_hardware_are_read() -> None:
    assert roles_of("prefill=2, decode=1") == (Role.PREFILL, Role.PREFILL, Role.DECODE)
    assert roles_of("mixed=1,decode=1") == (Role.MIXED, Role.DECODE)
    assert {role: each.name for role, each in profiles_of("prefill=a100-opt13b-tp2").items()} == {
        Role.PREFILL: "a100-opt13b-tp2"
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_heading_says_how_the_steps_of_each_role_vary() -> None:
    """Before: by what --noise says, whatever varied them."""
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    plan = ClusterPlan.of(profile_of("cpu-smollm2"), roles, "least_loaded")
    steps, noise = {Role.DECODE: (VariedStep(1.0, False),)}, {Role.DECODE: 0.2, Role.MIXED: 0.9}
    assert variation(0.05, plan) == "by 5%"
    assert variation(0.05, replace(plan, noise_of=noise)) == "by 5% (prefill), by 20% (decode)"
    assert variation(0.05, replace(plan, steps_of=steps)) == "as recorded (decode), by 5% (prefill)"
    assert variation(0.05, replace(plan, steps_of=steps, roles=(Role.DECODE,))) == "as recorded (decode)"


def test_progress_is_drawn_on_a_terminal() -> None:
    screen = Terminal()
    progress = SimulationProgress(screen)
    progress.start("goodput 2.00 req/s", 4)
    progress.ended(1)
    progress.clear()
    assert "goodput 2.00 req/s" in screen.getvalue() and "1/4" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("share", "full"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_a_share_is_drawn_as_a_bar(share: float, full: int) -> None:
    assert len(bar(share)) == 12 and bar(share).count("█") == full


@pytest.mark.parametrize(("late", "warned"), [(0.0, False), (0.2, True)])
def test_a_rate_at_which_requests_pile_up_is_told(late: float, warned: bool) -> None:
    """Each of 400 requests, ten a second, ends that much later than the one before."""
    run = [outcome(arrived=n / 10, ended=n / 10 + 0.3 + late * n) for n in range(400)]
    found = PolicyResult(policy="a", rates={10.0: figures(10.0, [OutcomeColumns(run)])}, goodput=10.0)
    assert ("pile up" in goodput_line(found, 1, 0.9)) is warned


def test_policies_are_compared_with_the_first() -> None:
    found = [PolicyResult(policy="a", goodput=2.0), PolicyResult(policy="b", goodput=3.0), PolicyResult(policy="c")]
    assert [line.split()[-1] for line in comparison(found).splitlines()] == ["a", "1.00×", "1.50×", "—"]
    assert "0.5 a worker" in goodput_line(found[0], 4, 0.9)
    assert "no rate attains 90%" in goodput_line(found[2], 4, 0.9)


TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n / 4},{40 + n},{5 + n}\n" for n in range(12))


@pytest.mark.parametrize(
    "flags", [("--workers", "mixed=1"), ("--system", "vllm-tp1"), ("--system", "distserve-c21d12")]
)
def test_a_trace_is_played_at_its_own_rate(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, out = tmp_path / "some.csv", tmp_path / "out.json"
    trace.write_text(TRACE)
    limits = ("--ttft-ms", "250", "--tpot-ms", "100", "--json", str(out))
    assert cli.main(["simulate", "--trace", str(trace), *flags, *limits]) == 0
    printed = capsys.readouterr().out
    assert "some.csv" in printed and "1 × 12 requests" in printed
    policy = orjson.loads(out.read_bytes())["policies"][0]
    (rate,) = policy["rates"]
    assert rate["rate"] == pytest.approx(4.0) and rate["offered"] == 12 and rate["attainment"] == 1.0
    assert (policy["policy"] == flags[1]) == (flags[0] == "--system")


def test_a_mistake_in_a_trace_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "some.csv"
    trace.write_text(TRACE + "3.5,many,4\n")
    assert cli.main(["simulate", "--trace", str(trace)]) == 2
    assert f"{trace}, line 14, prompt_tokens: 'many'" in capsys.readouterr().err


def test_lengths_are_given(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ("--prompt-tokens", "600", "--output-tokens", "2", "--noise", "0", "--json", str(out))
    assert cli.main([*QUICK, "--rate", "0.1", *lengths]) == 0
    (rate,) = orjson.loads(out.read_bytes())["policies"][0]["rates"]
    assert rate["ttft_p50"] == pytest.approx(1e3 * PROFILES["a100-opt13b"].prompt_seconds(600), rel=0.05)


def test_hardware_is_described_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION)
    assert cli.main([*QUICK, "--rate", "1", "--profile", str(file)]) == 0
    assert "mine" in capsys.readouterr().out
    file.write_text(DESCRIPTION.replace("flops = 312e12", "flops = 0"))
    assert cli.main([*QUICK, "--rate", "1", "--profile", str(file)]) == 2
    assert f"{file}, hardware.flops: 0" in capsys.readouterr().err
