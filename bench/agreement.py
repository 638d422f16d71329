"""How far a simulated run is from the measured one that it repeats: attainment in points, latencies in percent.

Pure: outcomes and figures in, figures and a table out. It neither measures nor simulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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
    """Runs at `share` of the deployment's capacity, each measured and simulated. `rate` in requests a second, the mean.

    Attainment is compared over all of them, and a latency by the median run: a machine that is slow for one run's time
    then says little.
    """

    case: str
    deployment: str
    workload: str
    share: float
    rate: float
    pairs: Sequence[tuple[ServedFigures, ServedFigures]]  # of each run what was measured, and what simulated

    @property
    def offered(self) -> int:
        return sum(measured.offered for measured, _ in self.pairs)

    @property
    def attained(self) -> tuple[float, float]:
        """The shares that attained, measured and simulated, each run counting by its requests."""
        weights = [measured.offered / max(1, self.offered) for measured, _ in self.pairs]
        measured, simulated = (
            sum(weight * each.attainment for weight, each in zip(weights, side, strict=True))
            for side in zip(*self.pairs, strict=True)
        )
        return measured, simulated

    @property
    def points(self) -> float:
        """By which the simulated attainment is above the measured one."""
        measured, simulated = self.attained
        return 100 * (simulated - measured)

    def latency(self, name: str) -> tuple[float, float] | None:
        """Milliseconds, measured and simulated, each the median of the runs that have both; None where none has."""
        both = [(measured.latencies[name], simulated.latencies[name]) for measured, simulated in self.pairs]
        known = [(one, other) for one, other in both if one and other is not None]
        return (median(one for one, _ in known), median(other for _, other in known)) if known else None

    def apart(self, name: str) -> float | None:
        """By which share the simulated latency is above the measured one, in the median run."""
        both = [(measured.latencies[name], simulated.latencies[name]) for measured, simulated in self.pairs]
        known = [other / one - 1 for one, other in both if one and other is not None]
        return median(known) if known else None

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
    """Markdown, a line for each case: measured → simulated, and by how much they are apart."""
    heads = ["deployment", "workload", "of capacity", "req/s", "runs", "requests", "attained, %"]
    heads += [f"{name[:4].upper()} {name[5:]}, ms" for name in LATENCIES] + ["too far apart"]
    rows = []
    for each in agreements:
        measured, simulated = each.attained
        attained = f"{100 * measured:.1f} → {100 * simulated:.1f} ({each.points:+.1f})"
        latencies = [_latency(each, name) for name in LATENCIES]
        counts = [f"{each.share:.0%}", f"{each.rate:.2f}", str(len(each.pairs)), str(each.offered)]
        told = ", ".join(each.too_far) or "nothing"
        rows.append([each.deployment, each.workload, *counts, attained, *latencies, told])
    return table(heads, rows)


def _latency(agreement: Agreement, name: str) -> str:
    apart, both = agreement.apart(name), agreement.latency(name)
    return "—" if apart is None or both is None else f"{both[0]:.4g} → {both[1]:.4g} ({apart:+.0%})"


def summary_line(agreements: Sequence[Agreement]) -> str:
    """How many figures are as near as they have to be."""
    far = [name for each in agreements for name in each.too_far]
    every = len(agreements) * (1 + len(LATENCIES))
    whole = sum(not each.too_far for each in agreements)
    return (
        f"{every - len(far)} of {every} figures are within {POINTS:g} points of attainment or {SHARE:.0%} of a latency;"
        f" all of {whole} of {len(agreements)} cases."
    )
