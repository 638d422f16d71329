"""What a placement attains at one rate, and what is asked of it: the narrow way between a search and what it searches.

Pure values. Whether a figure comes from the queueing model or from the classes that serve, its source says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from deploy.planner.placements import CandidatePlacement
from deploy.simulator.profiles import Profile
from deploy.simulator.texts import VOCABULARY
from deploy.simulator.traffic import Arrival, DrawnRequest, Traffic, arrivals, drawn, trace
from serving.messages import Request, SamplingParams

LEVELS = (*(level / 20 for level in range(1, 20)), 0.99)
"""Of the quantiles that are kept of a distribution."""
P50, P90 = LEVELS.index(0.5), LEVELS.index(0.9)
STEP = 300  # a trace has a multiple of so many requests, so that rates near each other share it


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTraffic:
    """Traffic as it is asked for: at least so many requests, and at least `seconds` of them, at every rate.

    Lengths are cut, and objectives left out are taken, as they fit `profile`: the model on its smallest worker.
    `pairs` of prompt and output tokens, over and over, go before the lengths that the traffic draws; of a `recorded`
    trace that has more of them than a run, these are of all its parts.
    """

    traffic: Traffic
    profile: Profile
    requests: int = 600
    seconds: float = 0.0
    pairs: tuple[tuple[int, int], ...] = ()
    recorded: bool = False

    def count(self, rate: float) -> int:
        """Requests of a run at this rate: a whole multiple of 300 where seconds are asked for."""
        wanted = rate * self.seconds
        return self.requests if wanted <= self.requests else -int(-wanted // STEP) * STEP


@dataclass(frozen=True, slots=True)
class OfferedRequests:
    """A trace as plain lists: seconds at one request a second, tokens, objectives in seconds (inf: none)."""

    at: list[float]
    prompt: list[int]
    output: list[int]
    ttft: list[float]
    tpot: list[float]


def offered(load: OfferedTraffic, rate: float, seed: int) -> OfferedRequests:
    """The requests of a run. The same for every placement, and at every rate in which as many come."""
    return _offered(load, load.count(rate), seed)


@lru_cache(maxsize=32)
def _offered(load: OfferedTraffic, count: int, seed: int) -> OfferedRequests:
    made = _paired(load, count, seed) if load.pairs else drawn(load.traffic, load.profile, count, seed)
    kinds = [kind.objectives(load.profile) for kind in load.traffic.classes]
    slos = [kinds[each.kind] for each in made]
    return OfferedRequests(
        [each.at for each in made],
        [each.prompt for each in made],
        [each.output for each in made],
        [float("inf") if slo.ttft_ms is None else slo.ttft_ms / 1e3 for slo in slos],
        [float("inf") if slo.tpot_ms is None else slo.tpot_ms / 1e3 for slo in slos],
    )


def _paired(load: OfferedTraffic, count: int, seed: int) -> list[DrawnRequest]:
    """With the lengths of the file, of all parts of a recorded one alike, cut as those that are drawn are."""
    longest, made = load.profile.max_model_len, []
    step = max(1, len(load.pairs) // count) if load.recorded else 1
    for number, at in enumerate(arrivals(count, load.traffic.burstiness, seed)):
        prompt, output = load.pairs[number * step % len(load.pairs)]
        prompt = min(prompt, longest - 2)
        made.append(DrawnRequest(at, 0, prompt, min(output, longest - 1 - prompt)))
    return made


def arriving(load: OfferedTraffic, count: int, seed: int) -> tuple[Arrival, ...]:
    """The same requests with their tokens, at one a second."""
    if not load.pairs:
        return trace(load.traffic, load.profile, count, seed)
    generator = np.random.default_rng((seed, 0x504C))
    (kind,) = load.traffic.classes
    slo, made = kind.objectives(load.profile), []
    for number, each in enumerate(_paired(load, count, seed)):
        request = Request(
            request_id=f"{seed}-{number}",
            prompt=tuple(generator.integers(1, VOCABULARY, size=each.prompt).tolist()),
            sampling=SamplingParams(max_tokens=each.output, seed=number, temperature=0.0),
            slo=slo,
            service_class=kind.name,
        )
        made.append(Arrival(each.at, request, each.output))
    return tuple(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttainmentGoal:
    """The share of requests that must meet both objectives (`joint`), or each of them."""

    share: float = 0.9
    joint: bool = True

    def of(self, found: Attainment) -> float:
        """What is held against the share."""
        return found.joint if self.joint else min(found.ttft, found.tpot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attainment:
    """Shares of `offered` requests that met an objective, and quantiles at LEVELS in seconds.

    A run that was given up, since the goal was out of reach, has shares that the whole run could not have exceeded,
    and no quantiles.
    """

    rate: float
    offered: int
    ttft: float
    tpot: float
    joint: float
    ttft_seconds: tuple[float, ...] = ()
    tpot_seconds: tuple[float, ...] = ()

    @property
    def given_up(self) -> bool:
        return not self.ttft_seconds

    @property
    def ttft_p90(self) -> float:
        """Seconds; NaN of a run that was given up."""
        return self.ttft_seconds[P90] if self.ttft_seconds else float("nan")

    @property
    def tpot_p90(self) -> float:
        """Seconds; NaN of a run that was given up."""
        return self.tpot_seconds[P90] if self.tpot_seconds else float("nan")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Attainment:
        """Raises TypeError for fields that are not those. JSON has no infinity: it is null there."""
        lists = {
            name: tuple(float("inf") if each is None else each for each in value)
            for name, value in values.items()
            if isinstance(value, list)
        }
        return Attainment(**{**values, **lists})


def attained(rate: float, ttfts: Sequence[float], tpots: Sequence[float], requests: OfferedRequests) -> Attainment:
    """Of a whole run. Seconds, in the order of the requests; inf of those that never ended."""
    ttft, tpot = np.asarray(ttfts), np.asarray(tpots)
    met_ttft, met_tpot = ttft <= np.asarray(requests.ttft), tpot <= np.asarray(requests.tpot)
    return Attainment(
        rate=rate,
        offered=len(ttft),
        ttft=float(met_ttft.mean()),
        tpot=float(met_tpot.mean()),
        joint=float((met_ttft & met_tpot).mean()),
        ttft_seconds=_quantiles(ttft),
        tpot_seconds=_quantiles(tpot),
    )


def _quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, ...]:
    """At LEVELS: of the values themselves, since infinite ones have nothing between them."""
    return tuple(float(found) for found in np.quantile(values, LEVELS, method="higher"))


def merged(runs: Sequence[Attainment]) -> Attainment:
    """Over runs with seeds of their own: shares of all requests, quantiles as their mean."""
    total = sum(run.offered for run in runs)
    whole = [run for run in runs if not run.given_up] if not any(run.given_up for run in runs) else []
    return Attainment(
        rate=runs[0].rate,
        offered=total,
        ttft=sum(run.ttft * run.offered for run in runs) / total,
        tpot=sum(run.tpot * run.offered for run in runs) / total,
        joint=sum(run.joint * run.offered for run in runs) / total,
        ttft_seconds=tuple(float(value) for value in np.mean([run.ttft_seconds for run in whole], axis=0))
        if whole
        else (),
        tpot_seconds=tuple(float(value) for value in np.mean([run.tpot_seconds for run in whole], axis=0))
        if whole
        else (),
    )


class AttainmentModel(Protocol):
    """Says what a placement attains. The same arguments give the same answer, in every process."""

    @property
    def source(self) -> str:
        """What its figures are called in a report, and kept under."""

    def attainment(
        self, placement: CandidatePlacement, load: OfferedTraffic, rate: float, seed: int, goal: AttainmentGoal
    ) -> Attainment:
        """At `rate` requests a second in all. A run may be given up once the goal is out of reach."""
