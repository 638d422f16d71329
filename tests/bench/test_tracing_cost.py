"""The table of what traces cost: ratios within a round, so that a machine that slows down counts for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.tracing_cost import AGAIN, OFF, RATIOS, ServedSide, arguments, report, table


def side(factor: float, slowing: float = 1.0) -> ServedSide:
    nobody: Any = None
    made = ServedSide(nobody, nobody, Path("/nowhere"))
    for number in range(8):
        made.seconds.append(0.01 * factor * (1 + slowing * number))
        made.cpu.append(0.002 * factor)
    return made


def sides() -> dict[str, ServedSide]:
    return {name: side(1.5 if name == "1" else 1.0) for name in (OFF, *RATIOS, AGAIN)}


def test_ratios_are_those_of_one_round() -> None:
    rows = {row[0]: row for row in table(sides())[1:]}
    assert rows["ratio 1"][2] == rows["ratio 1"][4] == "1.500 (1.500 to 1.500)"
    assert rows["ratio 0.1"][2] == rows[AGAIN][4] == "1.000 (1.000 to 1.000)"
    assert rows[OFF][3] == "2.00" and rows["ratio 1"][3] == "3.00"


def test_the_page_has_every_side_and_says_under_what_load() -> None:
    page = report(table(sides()), arguments().parse_args(["--rounds", "8"]), "7.5 and 8.5")
    assert page.count("\n| ratio ") == len(RATIOS) and "load averages 7.5 and 8.5" in page
    assert "python -m bench.tracing_cost MODEL --rounds 8 " in page
