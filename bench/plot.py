"""Draws results as one page without dependencies: inline SVG, light and dark, to look at or to put on the web.

Pure: results in, text out. It knows line charts and what is worth plotting, and no library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.options import BenchOptions, Point
from bench.report import LATENCIES, loads, title
from bench.session import Results
from bench.summary import median_metrics

WIDTH, HEIGHT = 520, 300  # pixels of one panel
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 34, 40  # its margins
COLOURS = ("#3b6fd4", "#d9742b", "#2f9e6e", "#b0479a", "#8a7a1f", "#5a5f6b")
STYLE = """
svg{font:12px system-ui,sans-serif;background:#fff;fill:#222}
.grid{stroke:#ddd}.axis{stroke:#888}.line{fill:none;stroke-width:2}.limit{stroke:#c33;stroke-dasharray:5 4}
.title{font-weight:600;font-size:13px}.tick{fill:#666}
@media(prefers-color-scheme:dark){svg{background:#16181d;fill:#e6e6e6}.grid{stroke:#333}.tick{fill:#9a9a9a}}
"""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart: a curve for each server, a line where an objective lies, and some where the load changes."""

    title: str
    x_label: str
    curves: Mapping[str, Curve]
    limit: float | None = None  # on the y axis
    changes: Sequence[float] = ()  # on the x axis


def plot_svg(results: Results, options: BenchOptions) -> str:
    """All panels in one SVG, two beside each other. Raises ValueError when nothing was measured."""
    panels = choose_panels(results, options)
    if not panels:
        raise ValueError("nothing was measured, so there is nothing to plot")
    names = [target.name for target in options.targets]
    return sheet(title(options, None).removeprefix("── "), panels, names)


def sheet(heading: str, panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Panels as one SVG, two beside each other, below a legend of the curves' names."""
    rows = math.ceil(len(panels) / 2)
    width, height = 2 * WIDTH, rows * HEIGHT + 54
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<text x="16" y="22" class="title">{escape(heading)}</text>',
    ]
    for index, (name, colour) in enumerate(colours.items()):
        x = 16 + index * 190
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="40" y2="40" class="line" stroke="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="44">{escape(name)}</text>')
    for index, panel in enumerate(panels):
        place = f"translate({index % 2 * WIDTH},{index // 2 * HEIGHT + 54})"
        parts.append(f'<g transform="{place}">{draw(panel, colours)}</g>')
    return "\n".join([*parts, "</svg>"])


def plot_html(results: Results, options: BenchOptions) -> str:
    """The same as a page."""
    page = "<!doctype html><meta charset=utf-8><title>millrace bench</title><style>body{margin:0}</style>\n"
    return page + plot_svg(results, options) + "\n"


def choose_panels(results: Results, options: BenchOptions) -> list[Panel]:
    """Figures against the load where several loads were measured; the latencies' spread where it was one."""
    points = loads(results)
    slo = options.slo
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms}
    latencies = [(name, stem, limits.get(stem)) for name, stem in LATENCIES]
    panels = []
    if len(points) == 1:
        for name, stem, limit in latencies:
            keys = [(50.0, f"median_{stem}_ms"), (90.0, f"p90_{stem}_ms"), (99.0, f"p99_{stem}_ms")]
            curves = {target.name: _spread(results, points[0], target.name, keys) for target in options.targets}
            panels.append(Panel(title=f"{name}, ms", x_label="percentile", curves=curves, limit=limit))
        return panels
    wanted: list[tuple[str, str, float, float | None]] = [("output tokens per second", "output_throughput", 1, None)]
    if slo.given:
        wanted.append(("requests that met the objectives, %", "slo_attainment", 100, slo.attainment * 100))
    wanted += [(f"{name} p90, ms", f"p90_{stem}_ms", 1, limit) for name, stem, limit in latencies]
    axis = "concurrency" if points and points[0].concurrency is not None else "requests per second sent"
    for name, key, scale, limit in wanted:
        curves = {target.name: _against_load(results, points, target.name, key, scale) for target in options.targets}
        panels.append(Panel(title=name, x_label=axis, curves=curves, limit=limit))
    return panels if points else []


def _against_load(results: Results, points: Sequence[Point], target: str, key: str, scale: float) -> Curve:
    values = [(point, median_metrics([one.summary for one in results.at(point, target)]).get(key)) for point in points]
    return [(point.load, value * scale) for point, value in values if value is not None]


def _spread(results: Results, point: Point, target: str, keys: Sequence[tuple[float, str]]) -> Curve:
    metrics = median_metrics([one.summary for one in results.at(point, target)])
    return [(level, metrics[key]) for level, key in keys if key in metrics]


def ticks(highest: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to at least `highest`, a step of 1, 2 or 5 times a power of ten apart."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(highest / step - 1e-9) + 1)]


def draw(panel: Panel, colours: dict[str, str]) -> str:
    """One panel as SVG elements; its origin is the panel's upper left corner."""
    points = [point for curve in panel.curves.values() for point in curve]
    x_ticks = ticks(max((x for x, _ in points), default=1.0))
    if panel.x_label == "percentile":
        x_ticks = [50.0, 60.0, 70.0, 80.0, 90.0, 100.0]
    y_ticks = ticks(max([y for _, y in points] + ([panel.limit] if panel.limit else []), default=1.0))

    def x_at(value: float) -> float:
        return round(LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT), 1)

    def y_at(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / y_ticks[-1] * (HEIGHT - TOP - BOTTOM), 1)

    parts = [_text(LEFT, 20, panel.title, "title")]
    for value in y_ticks:
        parts.append(_level(y_at(value), "grid"))
        parts.append(_text(LEFT - 6, y_at(value) + 4, f"{value:g}", "tick", anchor="end"))
    parts += [_text(x_at(value), HEIGHT - BOTTOM + 16, f"{value:g}", "tick", anchor="middle") for value in x_ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.x_label, "tick", anchor="middle"))
    if panel.limit is not None:
        parts.append(_level(y_at(panel.limit), "limit"))
    for x in map(x_at, panel.changes):
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="axis"/>')
    for name, curve in panel.curves.items():
        path = " ".join(f"{x_at(x)},{y_at(y)}" for x, y in curve)
        parts.append(f'<polyline points="{path}" class="line" stroke="{colours[name]}"/>')
        for x, y in curve:
            tip = escape(f"{name}: {y:.4g} at {x:g}")
            dot = f'<circle cx="{x_at(x)}" cy="{y_at(y)}" r="3.5" fill="{colours[name]}">'
            parts.append(f"{dot}<title>{tip}</title></circle>")
    return "".join(parts)


def _level(y: float, kind: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
