"""How far a simulated run is from the measured one that it repeats: attainment in points, latencies in percent.

Pure: outcomes and figures in, figures and a table out. It neither measures nor simulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.sse import Outcome
from bench.standings import table

LATENCIES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
POINTS, SHARE = 5.0, 0.15  # that a run may be apart: of attainment, and of each latency


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFigures:
    """`latencies` in milliseconds by name, of the requests that have one; None where none has. `errors` by kind."""

    offered: int
    attainment: float
    latencies: Mapping[str, float | None]
    errors: Mapping[str, int]


def measured_figures(outcomes: Sequence[Outcome], met: Callable[[Outcome], bool]) -> ServedFigures:
    """Of a run on a real server. Requests that failed or were refused have missed their objectives."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ttfts = [outcome.ttft for outcome in good]
    tpots = [outcome.tpot for outcome in good if outcome.tpot is not None]
    latencies = {
        f"{kind}_{name}": 1e3 * float(np.quantile(values, level)) if values else None
        for kind, values in (("ttft", ttfts), ("tpot", tpots))
        for name, level in (("p50", 0.5), ("p90", 0.9))
    }
    return ServedFigures(
        offered=len(outcomes),
        attainment=sum(map(met, outcomes)) / max(1, len(outcomes)),
        latencies=latencies,
        errors=dict(Counter(str(outcome.error) for outcome in outcomes if outcome.error is not None)),
    )


def simulated_figures(told: Mapping[str, Any]) -> ServedFigures:
    """Of a rate as `millrace simulate --json` writes it."""
    return ServedFigures(
        offered=told["offered"],
        attainment=told["attainment"],
        latencies={name: told[name] for name in LATENCIES},
        errors=told["errors"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One run at `share` of the deployment's capacity, measured and simulated. `rate` in requests a second."""

    case: str
    deployment: str
    workload: str
    share: float
    rate: float
    measured: ServedFigures
    simulated: ServedFigures

    @property
    def points(self) -> float:
        """By which the simulated attainment is above the measured one."""
        return 100 * (self.simulated.attainment - self.measured.attainment)

    def apart(self, latency: str) -> float | None:
        """By which share the simulated latency is above the measured one; None where either is missing."""
        simulated, measured = (each.latencies[latency] for each in (self.simulated, self.measured))
        return simulated / measured - 1 if simulated is not None and measured else None

    @property
    def too_far(self) -> list[str]:
        """What is further apart than it may be."""
        found = ["attainment"] if abs(self.points) > POINTS else []
        for latency in LATENCIES:
            apart = self.apart(latency)
            if apart is None or abs(apart) > SHARE:
                found.append(latency)
        return found


def agreement_table(agreements: Sequence[Agreement]) -> str:
    """Markdown, a line for each run: measured → simulated, and by how much they are apart."""
    heads = ["deployment", "workload", "of capacity", "req/s", "requests", "attained, %"]
    heads += [f"{name[:4].upper()} {name[5:]}, ms" for name in LATENCIES] + ["too far apart"]
    rows = []
    for each in agreements:
        attained = f"{100 * each.measured.attainment:.1f} → {100 * each.simulated.attainment:.1f} ({each.points:+.1f})"
        latencies = [_latency(each, name) for name in LATENCIES]
        counts = [f"{each.share:.0%}", f"{each.rate:.2f}", str(each.measured.offered)]
        told = ", ".join(each.too_far) or "nothing"
        rows.append([each.deployment, each.workload, *counts, attained, *latencies, told])
    return table(heads, rows)


def _latency(agreement: Agreement, name: str) -> str:
    apart = agreement.apart(name)
    if apart is None:
        return "—"
    return f"{agreement.measured.latencies[name]:.4g} → {agreement.simulated.latencies[name]:.4g} ({apart:+.0%})"


def summary_line(agreements: Sequence[Agreement]) -> str:
    """How many figures are as near as they have to be."""
    far = [name for each in agreements for name in each.too_far]
    every = len(agreements) * (1 + len(LATENCIES))
    whole = sum(not each.too_far for each in agreements)
    return (
        f"{every - len(far)} of {every} figures are within {POINTS:g} points of attainment or {SHARE:.0%} of a latency;"
        f" all of {whole} of {len(agreements)} runs."
    )
