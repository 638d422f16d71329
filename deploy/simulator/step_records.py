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
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from serving.step_cost import MOST, StepCost, StepLoad

SPELL_STEPS = 100.0  # in a row that are repeated as they came, in the mean: about as long as a machine stays slow
FEWEST_STEPS = 32
MOST_RATIO = 1e6  # a trace beyond that is not of the worker whose cost it is held against

Noise = Callable[[bool], float]
"""What the seconds of the next step are multiplied by; True: it computes prompts."""


@dataclass(frozen=True, slots=True)
class VariedStep:
    """A step that a worker has run: its seconds as a multiple of what its cost says, and if it computed prompts."""

    ratio: float
    prompts: bool


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
                    yield _step(event["args"], cost)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{path}: a step that is not as millrace serve --profile writes it") from error


def _step(told: dict[str, float], cost: StepCost) -> VariedStep:
    new, sequences, seconds = int(told["new_tokens"]), int(told["sequences"]), told["cadence_us"] / 1e6
    pairs, context = float(told["pairs"]), float(told["context_tokens"])
    if min(new, sequences) < 1 or not (0.0 <= pairs < math.inf and 0.0 <= context < math.inf and 0.0 <= seconds < MOST):
        raise ValueError(f"no step computes {told}")
    ratio = seconds / max(1e-12, cost.seconds(StepLoad(new, pairs, sequences, context)))
    if ratio > MOST_RATIO:
        raise ValueError(f"a ratio of {ratio}")
    return VariedStep(ratio, told["prompt_tokens"] > 0)


class RecordedNoise:
    """Repeats spells of recorded steps, each from a step drawn at random on (Politis and Romano, "The Stationary
    Bootstrap", 1994).

    A step that computes prompts takes the ratio of the next of those, and one that does not of the others: so a slow
    spell slows both. A kind that was not recorded is not varied.
    """

    def __init__(self, steps: Sequence[VariedStep], seed: int):
        self._steps = steps
        self._places = tuple(
            array("q", [at for at, step in enumerate(steps) if step.prompts is kind]) for kind in (False, True)
        )
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._at = self._left = 0

    def again(self, seed: int) -> RecordedNoise:
        """The same steps from the beginning, by other draws. Nothing of the steps is kept twice."""
        found = copy(self)
        found._begin(seed)
        return found

    def __call__(self, prompts: bool) -> float:
        places = self._places[prompts]
        if not places:
            return 1.0
        if not self._left:
            self._at = self._chance.randrange(len(self._steps))
            self._left = 1 + int(self._chance.expovariate(1.0 / SPELL_STEPS))
        self._left -= 1
        following = places[bisect_left(places, self._at) % len(places)]
        self._at = following + 1
        return self._steps[following].ratio
