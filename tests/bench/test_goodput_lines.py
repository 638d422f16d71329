"""The sitting asks bench.policies for what its cases say, and each has its share of the time."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import pytest

from bench import goodput_lines
from bench.goodput_lines import CASES, PACED_SECONDS, arguments_of, make_parser, sit
from bench.policies import comparisons_of, options_of
from bench.premises import Premises
from bench.referee import Comparison, ComparisonOptions


def asked(*flags: str) -> argparse.Namespace:
    return make_parser().parse_args(flags)


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_a_comparison_that_can_be_made(case: str) -> None:
    args = arguments_of(case, asked("--seconds", "7", "--seeds", "4"))
    options, found = options_of(args), comparisons_of(args)
    assert {one.mixture.name for one in found} <= {case, "long-mixed"} | {case.removeprefix("roles-")}
    assert (options.seconds, options.seeds, options.first_share) == (7.0, 4, 1.0)
    assert "int8" in options.base and options.out.name == f"bench-goodput-{case}"
    names = {one.name for each in found for one in each.contenders}
    assert len(names) >= 3 and any("goodput" in one.flags for each in found for one in each.contenders)


@pytest.mark.parametrize("case", CASES)
def test_paced_cases_are_the_same_comparisons_side_by_side(case: str) -> None:
    args = arguments_of(case, asked("--paced", "--lanes", "2"))
    options, found = options_of(args), comparisons_of(args)
    assert args.paced and options.lanes == 2 and options.seconds == PACED_SECONDS
    assert options.start is not None and options.start > 0
    assert "int8" not in options.base and "float32" in options.base
    real = comparisons_of(arguments_of(case, asked("--slo-scale", "3")))
    assert [one.mixture for one in found] == [one.mixture for one in real[: len(found)]]
    assert {one.name for each in found for one in each.contenders} == {
        one.name for each in real for one in each.contenders
    }
    assert {each.case for each in found}.isdisjoint(each.case for each in real)


def test_wider_fleets_have_fewer_lanes() -> None:
    """Two cores carry six workers of that pace, and not nine."""
    for case in CASES:
        args = arguments_of(case, asked("--paced"))
        widest = max(len(one.workers()) for one in comparisons_of(args)[0].contenders)
        assert args.lanes * widest <= 6


def test_roles_have_as_many_workers_each() -> None:
    found = comparisons_of(arguments_of("roles", asked()))[0]
    assert {len(one.workers()) for one in found.contenders} == {3}


def test_the_time_is_shared_and_an_interrupted_case_ends_the_sitting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, float]] = []
    statuses = iter([0, 1, 130])

    async def made(options: ComparisonOptions, comparisons: Sequence[Comparison], on: Premises | None) -> int:
        begun.append((options.out.name, options.until - time.monotonic()))
        return next(statuses)

    monkeypatch.setattr(goodput_lines, "compare", made)
    cases = "chat,roles,long-mixed,chunks"
    assert asyncio.run(sit(asked("--cases", cases, "--minutes", "40"))) == 130
    assert [name for name, _ in begun] == [f"bench-goodput-{case}" for case in cases.split(",")[:3]]
    assert [left / 60 for _, left in begun] == pytest.approx([10.0, 40 / 3, 20.0], rel=0.1)


def test_all_cases_have_a_name_together(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def made(options: ComparisonOptions, comparisons: Sequence[Comparison], on: Premises | None) -> int:
        begun.append(options.out.name.removeprefix("bench-goodput-"))
        return 0

    monkeypatch.setattr(goodput_lines, "compare", made)
    assert asyncio.run(sit(asked("--cases", "all"))) == 0
    assert begun == list(CASES)


def test_a_case_that_there_is_not_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match="--cases nothing"):
        asyncio.run(sit(asked("--cases", "chat,nothing")))
