"""What a plan found, in words and tables of a terminal: the verdict, the ranking, and what was left out.

It draws what an answer has, and computes nothing of its own but shares of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from deploy.planner.answer import PlanAnswer, PlannedPlacement

if TYPE_CHECKING:
    from rich.table import Table

TITLES = ("devices", "req/s", "a device", "cost/1M", "TTFT p90", "TPOT p90", "queues", "source", "front")
SHORT, WHOLE = 6, 120  # columns that a narrow terminal has, and characters from which all are shown
EVEN = 0.03  # a ratio within it says that neither is better


def verdict(answer: PlanAnswer) -> str:
    """One sentence: whether to split, what to run, and by how much it is better than the other kind."""
    best, split, mixed = answer.best(), answer.best(True), answer.best(False)
    assert best is not None
    if split is None or mixed is None:
        only, other = ("aggregated", "split") if split is None else ("split", "aggregated")
        return f"Run {best.placement}: no {other} placement fits and meets the objectives, so it is {only} or nothing."
    ratio = answer.ratio
    assert ratio is not None
    one, other = (f"{each.per_device:.3g}" for each in (split, mixed))
    figures = f"{split.placement} attains {one} requests/s and device, {mixed.placement} {other}"
    if abs(ratio - 1) <= EVEN:
        return f"Either will do: {figures} ({ratio:.2f}×, {split.source})."
    if ratio < 1:
        return f"Do not disaggregate: {figures}, so splitting gives {ratio:.2f}× of it ({split.source})."
    return f"Disaggregate: {figures}, so splitting gives {ratio:.2f}× of it ({split.source})."


def ranking(answer: PlanAnswer, most: int = 20, width: int = WHOLE) -> Table:
    """The best `most`, with the figures of both sources. Where `width` is too narrow for all columns, the first ones:
    the others are in the report. Names of placements wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("placement")
    titles = TITLES if width >= WHOLE else TITLES[:SHORT]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for number, each in enumerate(answer.ranked[:most], 1):
        figures = (str(each.placement.devices), *figures_of(each))[: len(titles)]
        table.add_row(str(number), str(each.placement), *figures)
    return table


def figures_of(each: PlannedPlacement) -> tuple[str, ...]:
    """Texts of a row: goodput, of a device, cost, latencies, the queues' goodput, source, front."""
    best = each.figures.at_best
    late = ("–", "–") if best is None else (f"{best.ttft_p90 * 1e3:.0f} ms", f"{best.tpot_p90 * 1e3:.0f} ms")
    queues = each.estimate if each.alike is None else each.alike
    return (
        f"{each.goodput:.3g}",
        f"{each.per_device:.3g}",
        f"{each.per_million:,.0f}",
        *late,
        f"{queues.rate or 0:.3g}",
        each.source,
        "" if each.dominated_by is not None else "•",
    )


def left_out(answer: PlanAnswer, most: int = 12) -> list[str]:
    """A line for each reason with examples, the rarest first: these are the ones to act on."""
    reasons = Counter(_kind(each.reason) for each in answer.rejected)
    lines = []
    for reason, count in sorted(reasons.items(), key=lambda found: (found[1], found[0]))[:most]:
        names = [each.what for each in answer.rejected if _kind(each.reason) == reason]
        more = f" and {count - 2} more" if count > 2 else ""
        lines.append(f"{'; '.join(names[:2])}{more}: {reason}")
    return lines


def _kind(reason: str) -> str:
    """Reasons that differ in a figure or a name alone are of one kind."""
    return reason.split(" by ")[0] if reason.startswith("dominated") else reason.split(" (")[0]


def difference(answer: PlanAnswer) -> list[str]:
    """How far the simulator and the queues are apart, of each finalist over the same requests."""
    lines = []
    for each in answer.ranked:
        if each.simulated is None or each.alike is None or not each.goodput or not each.alike.rate:
            continue
        share = each.alike.rate / each.goodput - 1
        lines.append(
            f"{each.placement}: simulated {each.goodput:.3g} requests/s, queues {each.alike.rate:.3g} ({share:+.0%})"
        )
    return lines
