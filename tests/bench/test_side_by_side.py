"""Paced contenders side by side, a lane each: none starts while another is measured, and kept runs are not repeated."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import policies, referee
from bench.contenders import Contender
from bench.endpoint import ServerError
from bench.ledger import Trial, TrialKey
from bench.mixture import Mixture
from bench.policies import add_arguments, comparisons_of, options_of
from bench.premises import STEADY, Premises
from bench.referee import Comparison, ComparisonOptions
from bench.side_by_side import LaneReferee, on_grid
from bench.step_lags import BUSY, LATE

NAMES = ("goodput", "least_loaded", "round_robin", "prefix_aware")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--paced", "--workloads", "chat", "--seeds", "2", *flags])


def asked(out: Path, *flags: str) -> tuple[ComparisonOptions, list[Comparison]]:
    args = parse("--growth", "1.2", "--rate-tolerance", "0.25", "--out", str(out), *flags)
    return options_of(args), comparisons_of(args)


@dataclass
class Servers:
    """Stands for servers: a rate of up to `good` attains. Counts what goes on at once."""

    good: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 3.0))
    fails: Callable[[str, str], bool] = lambda name, what: False
    strained: bool = False
    up: int = 0
    most_up: int = 0
    measuring: Counter[str] = field(default_factory=Counter)
    most_measuring: int = 0
    runs: list[tuple[str, float, int]] = field(default_factory=list)
    flags: list[list[str]] = field(default_factory=list)

    async def open(self, contender: Contender, mixture: Mixture, stack: AsyncExitStack, **how: Any) -> str:
        assert not self.measuring.total(), "a server starts while others are measured"
        assert how["module"] == "scripts.paced"
        self.flags.append(list(how["base"]))
        await self._work(contender.name, "open")
        self.up += 1
        self.most_up = max(self.most_up, self.up)
        stack.callback(self._closed)
        return contender.name

    def _closed(self) -> None:
        self.up -= 1

    async def warm(self, server: str, mixture: Mixture, seconds: float) -> float:
        assert not self.measuring.total(), "a server learns while others are measured"
        await self._work(server, "warm")
        return self.good[server]

    async def measure(self, server: str, mixture: Mixture, key: TrialKey, **how: Any) -> Trial:
        assert not self.measuring[server], "runs of one server are one after the other"
        self.measuring[server] += 1
        self.most_measuring = max(self.most_measuring, self.measuring.total())
        try:
            await self._work(server, "measure")
        finally:
            self.measuring[server] -= 1
        self.runs.append((server, key.rate, key.seed))
        metrics = {BUSY: 0.9, LATE: 0.08} if self.strained else {BUSY: 0.5, LATE: 0.01}
        met = 20 if key.rate <= self.good[server] else 10
        return Trial(key=key, offered=20, ended=20, met=met, metrics=metrics, kinds={"chat": [20, met]})

    async def _work(self, name: str, what: str) -> None:
        await asyncio.sleep(0.002)
        if self.fails(name, what):
            raise ServerError("it has ended")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    for name, stands_for in (("open_server", made.open), ("warm_up", made.warm), ("measure", made.measure)):
        monkeypatch.setattr(referee, name, stands_for)
    return made


def lanes(options: ComparisonOptions) -> LaneReferee:
    return LaneReferee(options, Premises(module="scripts.paced", model=Path("some"), pace=STEADY, lags=Path("lags")))


async def test_contenders_are_measured_at_once_in_lanes_at_the_same_rates(servers: Servers, tmp_path: Path) -> None:
    servers.good |= {"least_loaded": 2.4, "prefix_aware": 2.1}
    options, comparisons = asked(tmp_path / "found", "--lanes", "3")
    await lanes(options).run(comparisons)
    assert (servers.most_up, servers.most_measuring, servers.up) == (3, 3, 0)
    assert all(flags[0] == "some" and "torch" in flags for flags in servers.flags)
    for name, good in servers.good.items():
        rates = list(dict.fromkeys(rate for each, rate, _ in servers.runs if each == name))
        assert max(rate for rate in rates if rate <= good) * 1.25 >= min(rate for rate in rates if rate > good)
        assert [(rate, seed) for each, rate, seed in servers.runs if each == name] == [
            (rate, seed) for rate in rates for seed in (0, 1)
        ]
    grid = [1.2**number for number in range(12)]
    assert all(any(rate == pytest.approx(power, rel=1e-3) for power in grid) for _, rate, _ in servers.runs)
    text = (tmp_path / "found.md").read_text()
    assert "unfinished" not in text and "busy 50.0% to 50.0%" in text and "overloaded" not in text
    rows = [line.split("|")[1].strip() for line in text.partition("attained at")[2].splitlines()[2:] if "|" in line]
    assert len(rows) == len(set(rows)), "one rate has one row"


async def test_a_strained_machine_is_told_of(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.strained = True
    options, comparisons = asked(tmp_path / "found")
    await lanes(options).run(comparisons)
    assert "overloaded machine: not to be believed" in (tmp_path / "found.md").read_text()
    assert "90% busy, steps 8.0% longer" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["open", "warm", "measure"])
async def test_a_contender_whose_server_fails_ends_alone(servers: Servers, tmp_path: Path, what: str) -> None:
    servers.fails = lambda name, at: (name, at) == ("least_loaded", what)
    options, comparisons = asked(tmp_path / "found", "--lanes", "2")
    made = lanes(options)
    await made.run(comparisons)
    assert made.failed and servers.up == 0
    assert {name for name, _, _ in servers.runs} == set(NAMES) - {"least_loaded"}
    assert (tmp_path / "found.md").read_text().count("unfinished") == 1


async def test_an_ended_comparison_goes_on_and_a_finished_one_starts_nothing(servers: Servers, tmp_path: Path) -> None:
    options, comparisons = asked(tmp_path / "found", "--lanes", "4")
    made, measure = lanes(options), servers.measure

    async def once(server: str, mixture: Mixture, key: TrialKey, **how: Any) -> Trial:
        if len(servers.runs) >= 5:
            made.interrupted.set()
        return await measure(server, mixture, key, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(referee, "measure", once)
        await made.run(comparisons)
    assert 5 <= len(servers.runs) < 12
    assert "unfinished" in (tmp_path / "found.md").read_text()
    await lanes(options).run(comparisons)
    assert len(servers.runs) == len(set(servers.runs)), "nothing is measured twice"
    assert "unfinished" not in (tmp_path / "found.md").read_text()
    opened = len(servers.flags)
    await lanes(options).run(comparisons)
    assert len(servers.flags) == opened
    assert "unfinished" not in (tmp_path / "found.md").read_text()


async def test_a_first_rate_that_is_given_is_where_all_begin(servers: Servers, tmp_path: Path) -> None:
    options, comparisons = asked(tmp_path / "found", "--rate", "2.5", "--lanes", "4")
    await lanes(options).run(comparisons)
    assert {rate for _, rate, seed in servers.runs[:4]} == {2.5}


async def test_without_a_pace_servers_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    async def run(self: referee.Referee, comparisons: object) -> None:
        made.append(type(self).__name__)

    monkeypatch.setattr(referee.Referee, "run", run)
    options, comparisons = asked(tmp_path / "found")
    for on in (None, Premises(), Premises(pace=STEADY)):
        await policies.compare(options, comparisons, on)
    assert made == ["Referee", "Referee", "LaneReferee"]


@given(rate=st.floats(0.01, 1e4), growth=st.floats(1.05, 2.0))
def test_the_grid_is_within_half_a_step_and_holds_its_own(rate: float, growth: float) -> None:
    found = on_grid(rate, growth)
    assert rate / growth**0.51 <= found <= rate * growth**0.51
    assert on_grid(found, growth) == found


def test_paced_settings_are_kept_apart_and_all_contenders_are_in_one_comparison() -> None:
    (paced,) = comparisons_of(parse("--preset", "ablation", "--at-once", "4"))
    assert len(paced.contenders) == 7 and paced.mixture.kinds[0].slo.tpot_ms == 120.0
    args = parse("--preset", "ablation", "--at-once", "9", "--slo-scale", "3")
    args.paced = False
    (real,) = comparisons_of(args)
    assert real.mixture == paced.mixture and real.case != paced.case
    assert "torch" not in options_of(args).base
    with pytest.raises(ValueError, match="--paced --url"):
        options_of(parse("--url", "vllm=http://x"))
    with pytest.raises(ValueError, match="--lanes"):
        options_of(parse("--lanes", "0"))
