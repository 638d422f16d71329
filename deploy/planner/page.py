"""A plan as one HTML page that needs nothing beside it: verdict, pictures, tables, and the placement file.

Pure text, but for the pictures that deploy/planner/charts.py draws. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from deploy.planner.answer import PlanAnswer
from deploy.planner.charts import drawn_charts
from deploy.planner.drawn import difference, figures_of, verdict
from deploy.planner.placements import Rejection

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid #0072b2; padding: .4rem 1rem; background: #f3f7fa; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child, .words td, .words th { text-align: left; white-space: normal; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
"""
TITLES = (
    *("placement", "devices", "requests/s", "of a device", "cost of a million", "TTFT p90", "TPOT p90"),
    *("queues, requests/s", "source", "on the front"),
)
NOTES = (
    "Goodput is the highest rate at which the share of requests within the objectives is met. The source “simulated” is"
    " the simulator, which runs the schedulers, leases and router that serve; “estimate” is a model of queues, by which"
    " the finalists were chosen. Figures of one source alone are compared.",
    "On the front: no other placement is at least as good in goodput per device, cost, p90 TTFT, p90 TPOT and devices,"
    " and better in one. The front is of estimates throughout.",
)


def report_page(answer: PlanAnswer, placement_file: str) -> str:
    """The whole page."""
    question = answer.question
    machines = question.machines
    title = f"{question.model.name} on {machines.nodes} × {machines.devices_per_node} {machines.name}"
    rows = [(str(each.placement), str(each.placement.devices), *figures_of(each)) for each in answer.ranked]
    charts = "".join(
        f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in drawn_charts(answer).items()
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(verdict(answer))}</p>',
        *(f"<p>{escape(line)}</p>" for line in _asked(answer)),
        f'<div class="charts">{charts}</div>',
        "<h2>Placements</h2>",
        _table(TITLES, rows, "wide"),
        *(f"<p>{escape(note)}</p>" for note in (*NOTES, *difference(answer))),
        "<h2>Left out</h2>",
        _table(("what", "why"), [(each.what, each.reason) for each in _rejected(answer)], "wide words"),
        "<h2>placement.toml</h2>",
        f"<pre>{escape(placement_file)}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _asked(answer: PlanAnswer) -> Iterable[str]:
    question = answer.question
    load, goal = question.load, question.goal
    for kind in load.traffic.classes:
        slo = kind.objectives(load.profile)
        yield (
            f"{load.traffic.name}, {kind.name}: TTFT {slo.ttft_ms:.0f} ms and TPOT {slo.tpot_ms:.0f} ms, for"
            f" {goal.share:.0%} {'of requests at once' if goal.joint else 'of requests each'}."
        )
    yield (
        f"{answer.considered} placements {'searched by NSGA-II' if answer.evolved else 'looked at'}; at least"
        f" {load.requests} requests and {load.seconds:.0f} s at every rate, {len(question.seeds)} seed(s)."
    )


def _rejected(answer: PlanAnswer) -> Iterable[Rejection]:
    """What was never measured, and what was and is dominated."""
    yield from answer.rejected
    for each in answer.ranked:
        if each.dominated_by is not None:
            yield Rejection(str(each.placement), f"dominated by {each.dominated_by}")


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], classes: str) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="{classes}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
