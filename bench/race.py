"""One contender's search for its goodput, in runs of several seeds a rate, and how it stands at any time.

Pure: it says which run is wanted next and takes runs in, measured just now or kept from before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.contenders import Contender
from bench.goodput import GoodputSearch, SearchLimits
from bench.ledger import Trial, TrialKey


class Race:
    """A contender in one case. A rate is judged by all its seeds together, over the requests offered.

    A rate is given up once so many have missed that less than `give_up` of the requests can be met: it has failed by
    far, and the seeds that are left are not run.
    """

    def __init__(
        self, case: str, contender: Contender, limits: SearchLimits, seeds: Sequence[int], *, give_up: float = 0.75
    ):
        if not seeds:
            raise ValueError("--seeds must be at least 1")
        self.contender = contender
        self.trials: dict[float, list[Trial]] = {}  # by rate, in the order of seeds
        self.search = GoodputSearch(limits)
        self._case = case
        self._seeds = tuple(seeds)
        self._give_up = min(give_up, limits.attainment)

    def next(self) -> TrialKey | None:
        """The run that is wanted, None when the search has ended. The same until it has been recorded."""
        rate = self.search.next_rate()
        if rate is None:
            return None
        seed = self._seeds[len(self.trials.get(rate, ()))]
        return TrialKey(case=self._case, contender=self.contender.identity, rate=rate, seed=seed)

    def record(self, trial: Trial) -> None:
        """Take the run in that was wanted."""
        assert trial.key == self.next(), "runs come in the order in which they are asked for"
        rate = trial.key.rate
        trials = self.trials.setdefault(rate, [])
        trials.append(trial)
        if trial.stopped or len(trials) == len(self._seeds):
            self.search.record(rate, attainment(trials))

    def allowance(self, offered: int) -> int:
        """Requests of the run wanted next, one of `offered`, that may miss before its rate is given up."""
        rate = self.search.next_rate()
        trials = self.trials.get(rate, []) if rate is not None else []
        missed = sum(trial.offered - trial.met for trial in trials)
        return int((1 - self._give_up) * offered * len(self._seeds) + 1e-9) - missed

    def standing(self) -> Standing:
        """What has been found so far."""
        judged = sorted(self.search.measured)
        answer = self.search.answer
        failing = [rate for rate in judged if answer is None or rate > answer]
        lowest = failing[0] if failing else None
        return Standing(
            contender=self.contender,
            rate=answer,
            failing=lowest,
            crossing=self._crossing(answer, lowest),
            finished=self.search.next_rate() is None,
            attained={rate: attainment(self.trials[rate]) for rate in judged},
            trials={rate: tuple(self.trials[rate]) for rate in judged},
        )

    def _crossing(self, passing: float | None, failing: float | None) -> float | None:
        if passing is None or failing is None:
            return None
        high, low = attainment(self.trials[passing]), attainment(self.trials[failing])
        goal = self.search.limits.attainment
        return passing + (failing - passing) * (high - goal) / (high - low) if high > low else passing


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """`rate` is the highest that attains, `failing` the lowest above it that does not; requests a second.

    `crossing` is where the share attained crosses the goal on the straight line between the two.
    """

    contender: Contender
    rate: float | None
    failing: float | None
    crossing: float | None
    finished: bool
    attained: dict[float, float]
    trials: dict[float, tuple[Trial, ...]]

    @property
    def figure(self) -> float | None:
        """What ratios are made of: the crossing where there is one."""
        return self.crossing if self.crossing is not None else self.rate

    def by_kind(self) -> dict[str, float]:
        """The share attained by each kind of request at the highest rate that attains."""
        sums: dict[str, list[int]] = {}
        for trial in self.trials.get(self.rate or 0.0, ()):
            for kind, (ended, met) in trial.kinds.items():
                found = sums.setdefault(kind, [0, 0])
                found[0], found[1] = found[0] + ended, found[1] + met
        return {kind: met / ended for kind, (ended, met) in sums.items() if ended}

    def errors(self) -> dict[str, int]:
        """Failures by kind at the highest rate that attains."""
        found: dict[str, int] = {}
        for trial in self.trials.get(self.rate or 0.0, ()):
            for kind, count in trial.errors.items():
                found[kind] = found.get(kind, 0) + count
        return found


def attainment(trials: Sequence[Trial]) -> float:
    """The share of the requests offered that met their objectives; of a run that was stopped, of those that ended."""
    counted = sum(trial.ended if trial.stopped else trial.offered for trial in trials)
    return sum(trial.met for trial in trials) / counted if counted else 0.0
