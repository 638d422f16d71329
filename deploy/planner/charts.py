"""A plan's pictures: attainment by rate, distributions of TTFT and TPOT, and the Pareto front. Needs the extra `plan`.

It draws what an answer has. Split placements are round and blue to green, aggregated ones square and orange to red.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.planner.answer import PlanAnswer, PlannedPlacement
from deploy.planner.attainment import LEVELS, Attainment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPLIT = ("#0072b2", "#009e73", "#56b4e9")
MIXED = ("#d55e00", "#e69f00", "#cc79a7")
INCHES, DOTS = (6.4, 4.2), 150
SHOWN = 3  # placements with lines of their own


def check_library() -> None:
    """Raises ValueError where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'millrace[plan]', or --no-report")


def drawn_charts(answer: PlanAnswer) -> dict[str, str]:
    """Each chart as SVG, by its title."""
    return {title: _svg(draw, answer) for title, draw in CHARTS.items()}


def draw_picture(answer: PlanAnswer, path: Path) -> None:
    """All charts in one PNG."""
    figure = _figure(2 * INCHES[0], 2 * INCHES[1])
    for axes, (title, draw) in zip(figure.subplots(2, 2).flat, CHARTS.items(), strict=True):
        draw(axes, answer)
        axes.set_title(title, loc="left")
    figure.savefig(path, dpi=DOTS)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(draw: Callable[[Axes, PlanAnswer], None], answer: PlanAnswer) -> str:
    from matplotlib import rc_context

    figure, written = _figure(*INCHES), io.StringIO()
    draw(figure.subplots(), answer)
    with rc_context({"svg.hashsalt": draw.__name__}):  # names inside are the same each time, and differ by chart
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _lines(answer: PlanAnswer) -> list[tuple[PlannedPlacement, str]]:
    """Placements that have a curve, each with a colour."""
    with_curve = [each for each in answer.ranked if each.curve]
    colours = {True: iter(SPLIT), False: iter(MIXED)}
    return [
        (each, next(colours[split]))
        for split in (True, False)
        for each in [one for one in with_curve if one.placement.split == split][:SHOWN]
    ]


def _attainment(axes: Axes, answer: PlanAnswer) -> None:
    goal = answer.question.goal
    for each, colour in _lines(answer):
        devices = each.placement.devices
        axes.plot(*_shares(each.curve, goal.of, devices), color=colour, label=f"{each.placement}, queues")
        runs = [] if each.simulated is None else each.simulated.whole_runs()
        if runs:
            axes.plot(*_shares(runs, goal.of, devices), "D", color=colour, markersize=6, label="simulated")
    axes.axhline(100 * goal.share, color="#666666", linestyle=":", linewidth=1)
    _label(axes, "requests/s and device", "requests within objectives (%)")
    axes.set_ylim(0, 103)


def _shares(runs: Sequence[Attainment], share: Callable[[Attainment], float], devices: int) -> tuple[Any, Any]:
    return [run.rate / devices for run in runs], [100 * share(run) for run in runs]


def _front(axes: Axes, answer: PlanAnswer) -> None:
    for split, marker, colours, name in ((True, "o", SPLIT, "split"), (False, "s", MIXED, "aggregated")):
        for on_front, alpha in ((True, 1.0), (False, 0.25)):
            some = [
                each.judged()
                for each in answer.ranked
                if each.placement.split == split and (each.dominated_by is None) == on_front
            ]
            if not some:
                continue
            per_device, _, ttft, _, devices = np.array(some).T
            label = f"{name}, {'on the front' if on_front else 'dominated'}"
            sizes = 20 + 6 * devices
            axes.scatter(
                1e3 * ttft, -per_device, sizes, colours[0], marker=marker, alpha=alpha, label=label, linewidths=0
            )
    _label(axes, "TTFT p90 (ms)", "requests/s and device (size: devices)")


def _ttft(axes: Axes, answer: PlanAnswer) -> None:
    _distribution(axes, answer, "ttft_seconds", "TTFT (ms)", [kind[0] for kind in _objectives(answer)])


def _tpot(axes: Axes, answer: PlanAnswer) -> None:
    _distribution(axes, answer, "tpot_seconds", "TPOT (ms)", [kind[1] for kind in _objectives(answer)])


def _objectives(answer: PlanAnswer) -> list[tuple[float | None, float | None]]:
    load = answer.question.load
    found = [kind.objectives(load.profile) for kind in load.traffic.classes]
    return [(slo.ttft_ms, slo.tpot_ms) for slo in found]


def _distribution(axes: Axes, answer: PlanAnswer, which: str, title: str, objectives: Sequence[float | None]) -> None:
    """At each placement's goodput."""
    for each, colour in _lines(answer):
        best = each.figures.at_best
        values = [] if best is None else [1e3 * value for value in getattr(best, which)]
        if values:
            axes.plot(values, [100 * level for level in LEVELS], color=colour, label=f"{each.placement}, {each.source}")
    for objective in dict.fromkeys(objectives):
        if objective is not None:
            axes.axvline(objective, color="#666666", linestyle=":", linewidth=1)
    _label(axes, title, "requests (%)")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)


CHARTS: dict[str, Callable[[Any, PlanAnswer], None]] = {
    "Attainment by rate": _attainment,
    "The front: goodput against TTFT": _front,
    "TTFT at the goodput": _ttft,
    "TPOT at the goodput": _tpot,
}
