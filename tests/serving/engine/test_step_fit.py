"""The fit of steps' cost: it finds what steps take, follows the machine, forgets no regime, and is never absurd."""

from __future__ import annotations

import math
import random
import statistics
import threading
from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.engine.step_fit import (
    COEFFICIENTS,
    JUDGED,
    KEPT,
    LONGEST,
    RECENT,
    SAMPLE,
    SHORTEST,
    SPARE,
    StepFit,
    solve_nonnegative,
    vector,
)
from serving.step_cost import StepCost, StepLoad

GUESS = StepCost(fixed=2e-3, token=2e-4, pair=5e-8, sequence=2e-4, context=5e-7)


def decodes(chance: random.Random) -> StepLoad:
    count = chance.choice((1, 2, 4, 8, 16, 32))
    context = sum(chance.randrange(20, 1500) for _ in range(count))
    return StepLoad(count, context, count, context)


def prompts(chance: random.Random) -> StepLoad:
    return StepLoad.of(chance.randrange(0, 1500), chance.randrange(16, 512))


def both(chance: random.Random) -> StepLoad:
    return decodes(chance) + StepLoad.of(chance.randrange(0, 1500), chance.randrange(16, 480))


KINDS: tuple[Callable[[random.Random], StepLoad], ...] = (decodes, prompts, both)


class Machine:
    """A worker whose steps take what `cost` says, give or take; refitted once every `pace` steps."""

    def __init__(self, cost: StepCost, *, noise: float = 0.0, outliers: float = 0.0, seed: int = 1, pace: int = 50):
        self.cost = cost
        self.noise = noise
        self.outliers = outliers
        self.chance = random.Random(seed)
        self.pace = pace
        self.fit = StepFit(GUESS)
        self.scale = 1.0
        self.now = 0.0

    def takes(self, load: StepLoad) -> float:
        return self.scale * self.cost.seconds(load)

    def run(self, steps: int, kinds: Iterable[Callable[[random.Random], StepLoad]] = KINDS) -> None:
        kinds = tuple(kinds)
        for step in range(steps):
            kind = self.chance.choice(kinds)
            load = kind(self.chance)
            seconds = self.takes(load) * self.chance.lognormvariate(0.0, self.noise)
            if self.chance.random() < self.outliers:
                seconds *= self.chance.choice((0.1, 3.0, 10.0, 50.0))
            self.fit.observe(load, seconds, prompts=kind is not decodes)
            if step % self.pace == self.pace - 1:
                self.now += 1.0
                self.fit.refit(self.now)

    def errors(self, kind: Callable[[random.Random], StepLoad], count: int = 200) -> list[float]:
        loads = [kind(self.chance) for _ in range(count)]
        return [abs(self.fit.cost.seconds(load) / self.takes(load) - 1) for load in loads]


def within_a_magnitude(value: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(value / 10), math.log(value * 10)).map(math.exp)


COSTS = st.builds(StepCost, **{name: within_a_magnitude(getattr(GUESS, name)) for name in COEFFICIENTS})


@settings(max_examples=10)
@given(cost=COSTS, seed=st.integers(0, 1000))
def test_known_costs_are_found_in_noise_and_outliers(cost: StepCost, seed: int) -> None:
    machine = Machine(cost, noise=0.1, outliers=0.05, seed=seed)
    machine.run(1500)
    for kind in KINDS:
        errors = sorted(machine.errors(kind))
        assert statistics.median(errors) < 0.15 and errors[int(0.95 * len(errors))] < 0.35, kind


@settings(max_examples=10)
@given(cost=COSTS)
def test_without_noise_each_coefficient_is_found(cost: StepCost) -> None:
    machine = Machine(cost)
    machine.run(600)
    found, share = vector(machine.fit.cost), vector(cost)
    typical = np.mean(
        [
            [1, load.new_tokens, load.pairs, load.sequences, load.context_tokens]
            for load in map(both, [machine.chance] * 100)
        ],
        axis=0,
    )
    matters = share * typical > 0.2 * (share @ typical)
    assert found[matters] == pytest.approx(share[matters], rel=0.2)


LOADS = st.builds(
    StepLoad,
    new_tokens=st.integers(1, 100_000),
    pairs=st.floats(1, 1e10),
    sequences=st.integers(1, 1024),
    context_tokens=st.integers(1, 10_000_000),
)


ONE_TOKEN = StepLoad.of(0, 1)
SECONDS = (
    st.floats(1e-7, 1e3)
    | st.floats(-1.0, 1e12)
    | st.sampled_from([0.0, -1.0, 5e-324, 1e-12, 3600.0, 9999.0, 1e4, 1e9, 1e300, math.inf, -math.inf, math.nan])
)
ANY = st.floats(0, 9999, allow_subnormal=True)
ANY_COSTS = st.builds(
    StepCost, fixed=ANY, token=ANY, pair=ANY, sequence=ANY, context=ANY, error=ANY, samples=st.just(100)
).filter(lambda cost: cost.possible)


@example(
    steps=[(StepLoad(1, 1.0, 1, 1), 1.0, False), (StepLoad(1, 1.0, 1, 1), 1.0, False)],
    learned=StepCost(fixed=0.0, token=1.0, error=0.0, samples=100),
)
@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(LOADS | st.just(ONE_TOKEN), SECONDS, st.booleans()), min_size=1, max_size=60),
    learned=st.none() | COSTS | ANY_COSTS,
)
def test_whatever_is_seen_costs_stay_possible(
    steps: list[tuple[StepLoad, float, bool]], learned: StepCost | None
) -> None:
    fit = StepFit(GUESS, learned)
    for number, (load, seconds, with_prompts) in enumerate(steps):
        fit.observe(load, seconds, prompts=with_prompts)
        if number % 7 == 6 or load is steps[-1][0]:
            fit.refit(float(number))
        assert fit.cost.possible and fit.cost.error > 0.0
        coefficients = vector(fit.cost)
        assert np.isfinite(coefficients).all() and (coefficients >= 0).all() and coefficients[0] > 0.0
    fit.refit(1e9)
    seen = [(seconds, load) for load, seconds, _ in steps if SHORTEST <= seconds <= LONGEST]
    if seen:
        cheapest = min(seen, key=lambda step: step[0])[0]
        assert max(fit.cost.seconds(load) for seconds, load in seen if seconds == cheapest) >= 0.69 * cheapest


def test_steps_without_tokens_or_of_no_possible_time_say_nothing() -> None:
    fit = StepFit(GUESS)
    fit.observe(StepLoad(), 1.0, prompts=False)
    for seconds in (0.0, -1.0, 1e-9, 3600.0, math.inf, math.nan):
        fit.observe(StepLoad.of(0, 4), seconds, prompts=True)
    fit.refit(0.0)
    assert fit.cost == GUESS and fit.seen == 0


@pytest.mark.parametrize(("rare", "common"), [(prompts, decodes), (decodes, prompts), (both, decodes)])
def test_a_rare_regime_is_not_forgotten(
    rare: Callable[[random.Random], StepLoad], common: Callable[[random.Random], StepLoad]
) -> None:
    cost = StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-4, context=2e-6)
    machine = Machine(cost, noise=0.1, outliers=0.02, pace=200)
    machine.run(150, [rare])
    machine.run(10_000, [common])
    assert statistics.median(machine.errors(rare)) < 0.1 and statistics.median(machine.errors(common)) < 0.05


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 4.0])
def test_a_machine_of_another_pace_is_followed(factor: float) -> None:
    machine = Machine(StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-4, context=2e-6), noise=0.1)
    machine.run(3000)
    machine.scale = factor
    machine.run(200)
    for kind in KINDS:
        assert statistics.median(machine.errors(kind)) < 0.15, kind


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_machine_of_another_pace_is_followed_at_once_where_it_works(factor: float) -> None:
    machine = Machine(StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-4, context=2e-6), noise=0.1)

    def eight(chance: random.Random) -> StepLoad:
        return StepLoad(8, 8 * 400, 8, 8 * 400)

    machine.run(3000)
    machine.run(200, [eight])
    machine.scale = factor
    machine.run(100, [eight])
    assert statistics.median(machine.errors(eight)) < 0.15


def test_before_the_first_fit_the_guess_is_scaled_by_what_is_seen() -> None:
    fit, load, other = StepFit(GUESS), StepLoad.of(0, 100), StepLoad.of(500, 400)
    fit.observe(load, 3 * GUESS.seconds(load), prompts=True)
    assert fit.cost.seconds(other) == pytest.approx(3 * GUESS.seconds(other))
    assert fit.cost.samples == 0, "it is a guess yet"
    fit.observe(other, 3 * GUESS.seconds(other), prompts=True)
    fit.refit(0.0)
    assert fit.cost.samples == 2 and fit.cost.seconds(StepLoad(8, 800, 8, 800)) > 0


def test_a_first_step_that_took_an_age_is_soon_made_good() -> None:
    machine = Machine(StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-4, context=2e-6), noise=0.05, pace=15)
    machine.fit.observe(StepLoad.of(0, 300), 100 * machine.cost.seconds(StepLoad.of(0, 300)), prompts=True)
    machine.run(15)
    for kind in KINDS:
        assert statistics.median(machine.errors(kind)) < 0.5, kind


def test_few_steps_leave_the_others_at_the_guess_scaled() -> None:
    """Decodes alone tell nothing of prompts: those follow the guess, at the pace the decodes have shown."""
    machine = Machine(StepCost(**{name: 4 * getattr(GUESS, name) for name in COEFFICIENTS}), noise=0.05)
    machine.run(400, [decodes])
    assert statistics.median(machine.errors(prompts)) < 0.25


def test_what_was_learned_is_where_the_next_life_begins() -> None:
    cost = StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-5, context=2e-6)
    first = Machine(cost, noise=0.05)
    first.run(1000)
    second = Machine(cost, noise=0.05, seed=2)
    second.fit = StepFit(GUESS, first.fit.cost)
    assert vector(second.fit.cost) == pytest.approx(vector(first.fit.cost)) and max(second.errors(prompts)) < 0.1
    second.scale = 2.0
    second.run(300, [decodes])
    assert statistics.median(second.errors(decodes)) < 0.1
    assert statistics.median(second.errors(prompts)) < 0.3, "the machine is slower for prompts, too"


def test_it_is_refitted_once_a_second_and_only_with_news() -> None:
    fit, load = StepFit(GUESS), StepLoad.of(0, 100)
    fit.observe(load, 1.0, prompts=True)
    fit.refit(10.0)
    first = fit.cost
    fit.observe(load, 5.0, prompts=True)
    fit.refit(10.9)
    assert fit.cost.samples == first.samples == 1
    fit.refit(11.0)
    second = fit.cost
    assert second.samples == 2
    fit.refit(99.0)
    assert fit.cost == second


def test_only_the_newest_steps_of_a_bucket_are_kept() -> None:
    fit, load = StepFit(GUESS), StepLoad.of(0, 100)
    for seconds in range(1, 1000):
        fit.observe(load, float(seconds), prompts=True)
    fit.refit(0.0)
    assert fit.cost.samples == KEPT and fit.cost.seconds(load) == pytest.approx(990, rel=0.03)


def test_what_is_kept_does_not_grow_with_the_steps() -> None:
    """A simulated cluster has a thousand of these: 48 bytes a step of those kept, and a number for each residual."""
    machine = Machine(GUESS, noise=0.1)
    machine.run(3000)
    fit = machine.fit
    assert {len(bucket) for bucket in fit._buckets.values()} <= {SAMPLE.size * count for count in range(1, KEPT + 1)}
    assert all(len(kind.steps) == RECENT * SAMPLE.size for kind in fit._recent)
    assert all(len(kind.residuals) == JUDGED and len(kind._residuals) < JUDGED + SPARE for kind in fit._recent)


def test_the_error_is_that_of_predictions_made_before_and_told_by_kind() -> None:
    machine = Machine(StepCost(fixed=4e-3, token=7e-4, pair=4e-7, sequence=1e-4, context=2e-6), noise=0.2)
    machine.run(2000)
    assert machine.fit.cost.error == pytest.approx(0.2, rel=0.25)
    machine.noise = 0.02
    machine.run(2000, [prompts])
    without, with_prompts = machine.fit.errors
    assert without is not None and with_prompts is not None
    assert with_prompts < 0.08 < 0.15 < without, "nothing new was seen of decodes"


def test_one_thread_may_observe_while_another_fits() -> None:
    fit, chance = StepFit(GUESS), random.Random(3)
    loads = [kind(chance) for kind in KINDS for _ in range(300)]
    done = threading.Event()

    def observe() -> None:
        for _ in range(20):
            for load in loads:
                fit.observe(load, GUESS.seconds(load), prompts=load.new_tokens > load.sequences)
        done.set()

    thread = threading.Thread(target=observe)
    thread.start()
    now = 0.0
    while not done.is_set():
        fit.refit(now := now + 1.0)
    thread.join()
    fit.refit(now + 1.0)
    assert fit.seen == 20 * len(loads)
    assert fit.cost.seconds(loads[0]) == pytest.approx(GUESS.seconds(loads[0]), rel=0.01)


@settings(max_examples=100)
@given(st.integers(0, 10**6))
def test_nonnegative_least_squares_are_solved(seed: int) -> None:
    """Against every choice of what is zero."""
    chance = np.random.default_rng(seed)
    rows = chance.normal(size=(12, 4)) @ np.diag(chance.uniform(0.1, 10, 4))
    gram, right = rows.T @ rows + 1e-3 * np.eye(4), rows.T @ chance.normal(size=12)

    def cost(theta: np.ndarray) -> float:
        return float(theta @ gram @ theta / 2 - right @ theta)

    best = 0.0
    for chosen in product((False, True), repeat=4):
        free = np.array(chosen)
        if free.any():
            theta = np.zeros(4)
            theta[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            best = min(best, cost(theta)) if (theta >= 0).all() else best
    found = solve_nonnegative(gram, right)
    assert (found >= 0).all() and cost(found) == pytest.approx(best, abs=1e-9)


@given(st.floats(1.5, 4.0), st.booleans())
@settings(max_examples=20)
def test_single_steps_hardly_move_the_outlook(factor: float, prompts: bool) -> None:
    """It follows a machine that stays slow all the same."""
    machine, load = Machine(GUESS, noise=0.02), StepLoad(2, 400, 2, 400)
    machine.run(400)
    before, usual = machine.fit.outlook.seconds(load), machine.fit.cost.seconds(load)
    for _ in range(3):
        machine.fit.observe(load, factor * machine.takes(load), prompts=prompts)
    moved = machine.fit.outlook.seconds(load) / before
    assert 1.0 < moved < 1.15 and moved < 1 + 0.6 * (machine.fit.cost.seconds(load) / usual - 1)
    for _ in range(400):
        machine.fit.observe(load, factor * machine.takes(load), prompts=prompts)
    assert machine.fit.outlook.seconds(load) == pytest.approx(factor * machine.takes(load), rel=0.1)
