"""Steps that vary as those of a running worker did: a few that last several times as long, and slow spells.

It reads the trace that `millrace serve --profile` writes. A worker's own fit of its steps leaves out what is far from
the others, so that its `error` says little of them. Neither runners nor clusters are known here.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path

from serving.messages import Role
from serving.step_cost import MOST, StepCost, StepLoad

SPELL_STEPS = 100.0  # in a row that are repeated as they came, in the mean: about as long as a machine stays slow
FEWEST_STEPS = 32
FEWEST_BESIDE = 8  # of a kind, with others computing and without: below that the two are not told apart
MOST_RATIO = 1e6  # a trace beyond that is not of the worker whose cost it is held against

Noise = Callable[[bool], float]
"""What the seconds of the next step are multiplied by; True: it computes prompts."""


@dataclass(frozen=True, slots=True)
class VariedStep:
    """A step that a worker has run: its seconds as a multiple of what its cost says, and if it computed prompts.

    `began` and `ended` are seconds on the clock of its host. `beside`: a worker recorded with it computed as it began.
    """

    ratio: float
    prompts: bool
    began: float = 0.0
    ended: float = 0.0
    beside: bool = False


def read_steps(path: Path, cost: StepCost) -> tuple[VariedStep, ...]:
    """The steps of a trace, in their order, held against this cost. Raises ValueError that names the file; OSError."""
    found = tuple(_steps(path, cost))
    if len(found) < FEWEST_STEPS:
        raise ValueError(f"{path}: {len(found)} steps, give a trace (millrace serve --profile) of {FEWEST_STEPS}")
    return found


def _steps(path: Path, cost: StepCost) -> Iterator[VariedStep]:
    """Those that computed something. A trace that is still being written ends in the middle of a line: left out."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line.rstrip().rstrip(","))
            except (ValueError, RecursionError):  # of JSON, and of numbers of thousands of digits
                continue
            if not isinstance(event, dict) or event.get("name") != "step":
                continue
            try:
                if event["args"]["new_tokens"] != 0:
                    yield _step(event["args"], cost, event.get("ts", 0.0) / 1e6, event.get("dur", 0.0) / 1e6)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{path}: a step that is not as millrace serve --profile writes it") from error


def _step(told: dict[str, float], cost: StepCost, began: float, lasted: float) -> VariedStep:
    new, sequences, seconds = int(told["new_tokens"]), int(told["sequences"]), told["cadence_us"] / 1e6
    pairs, context = float(told["pairs"]), float(told["context_tokens"])
    if min(new, sequences) < 1 or not (0.0 <= pairs < math.inf and 0.0 <= context < math.inf and 0.0 <= seconds < MOST):
        raise ValueError(f"no step computes {told}")
    if not (math.isfinite(began) and 0.0 <= lasted < MOST):
        raise ValueError(f"no step begins at {began} and lasts {lasted}")
    ratio = seconds / max(1e-12, cost.seconds(StepLoad(new, pairs, sequences, context)))
    if ratio > MOST_RATIO:
        raise ValueError(f"a ratio of {ratio}")
    return VariedStep(ratio, told["prompt_tokens"] > 0, began, began + lasted)


def beside_each_other(recorded: Mapping[Role, Sequence[VariedStep]]) -> dict[Role, tuple[VariedStep, ...]]:
    """The same steps, each told whether a worker of another role computed as it began.

    Traces of one run: workers that share cores or memory slow each other down, and steps that were computed alone say
    nothing of that.
    """
    marks = {role: [False] * len(steps) for role, steps in recorded.items()}
    latest = dict.fromkeys(recorded, -math.inf)  # when the last step that began so far ended
    each = [[(step.began, role, at) for at, step in enumerate(steps)] for role, steps in recorded.items()]
    for began, role, at in merge(*map(sorted, each)):
        marks[role][at] = any(ended > began for other, ended in latest.items() if other is not role)
        latest[role] = max(latest[role], recorded[role][at].ended)
    return {
        role: tuple(replace(step, beside=beside) for step, beside in zip(steps, marks[role], strict=True))
        for role, steps in recorded.items()
    }


def _alone() -> bool:
    """What a worker is that no other was recorded with."""
    return False


class RecordedNoise:
    """Repeats spells of recorded steps, each from a step drawn at random on (Politis and Romano, "The Stationary
    Bootstrap", 1994).

    A step that computes prompts takes the ratio of the next of those, and one that does not of the others: so a slow
    spell slows both. A kind that was not recorded is not varied. Of a kind, those take turns apart that were computed
    beside another worker, where `others` says that one computes now, and those that were not.
    """

    def __init__(self, steps: Sequence[VariedStep], seed: int):
        self._steps = steps
        self._places = (self._of(False), self._of(True))
        self._begin(seed, _alone)

    def _of(self, prompts: bool) -> tuple[array[int], array[int]]:
        """Where the steps of a kind are: those that were computed alone, and beside another worker."""
        alone, beside = (
            array("q", [at for at, step in enumerate(self._steps) if (step.prompts, step.beside) == (prompts, kind)])
            for kind in (False, True)
        )
        if min(len(alone), len(beside)) >= FEWEST_BESIDE:
            return alone, beside
        both = array("q", sorted([*alone, *beside]))
        return both, both

    def _begin(self, seed: int, others: Callable[[], bool]) -> None:
        self._chance = random.Random(seed)
        self._others = others
        self._at = self._left = 0

    def again(self, seed: int, others: Callable[[], bool] = _alone) -> RecordedNoise:
        """The same steps from the beginning, by other draws. Nothing of the steps is kept twice."""
        found = copy(self)
        found._begin(seed, others)
        return found

    def __call__(self, prompts: bool) -> float:
        alone, beside = self._places[prompts]
        places = beside if beside is not alone and self._others() else alone
        if not places:
            return 1.0
        if not self._left:
            self._at = self._chance.randrange(len(self._steps))
            self._left = 1 + int(self._chance.expovariate(1.0 / SPELL_STEPS))
        self._left -= 1
        following = places[bisect_left(places, self._at) % len(places)]
        self._at = following + 1
        return self._steps[following].ratio
