"""What is learned for predictions: corrections, link costs, output lengths."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration import MOST_WORKERS, Calibration
from router.chances import within
from router.goodput import LATE, Goodput
from router.link_costs import LinkCosts
from router.output_lengths import OutputLengths
from router.policy import Decision
from router.request_state import Attempt, RequestState
from serving.messages import Build, Delta, FinishReason, Pooling, Role
from tests.router.conftest import World, wanted
from tests.router.costed import COST
from tests.router.test_goodput import choose, wanting, worker


def test_predictions_are_corrected_by_what_came_of_them() -> None:
    policy, slow, fast = Goodput(), worker("slow"), worker("fast")
    for _ in range(100):
        for each, factor in ((slow, 2.0), (fast, 1.0)):
            decision = choose(wanting(), each, policy=policy)
            predicted = decision.predicted
            assert predicted is not None
            raw = predicted.queue + predicted.prefill
            policy.observed(decision, ttft=raw * factor, tpot=predicted.token * factor)
    decision = choose(wanting(), slow, fast, policy=policy)
    assert decision.decode is fast
    told = {placed.decode: placed.predicted for placed in decision.considered}
    slower, quicker = told["slow"], told["fast"]
    assert slower is not None and quicker is not None
    assert slower.tpot / quicker.tpot == pytest.approx(2.0, rel=0.1), "so far apart is no chance"
    assert quicker.tpot / quicker.token == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("late", "taught"), [(0.9, 0.9), (1.2, 1.2), (30.0, LATE)])
def test_how_late_a_first_token_was_teaches_nothing(late: float, taught: float) -> None:
    """Workers pass what is late: it then waits for as long as others come, which no prediction is of."""
    policy = Goodput()
    for _ in range(300):
        decision = choose(wanting(tokens=1024, ttft=0.8), worker("w"), policy=policy)
        policy.observed(decision, ttft=0.8 * late)
    predicted = choose(wanting(tokens=1024, ttft=0.8), worker("w"), policy=policy).predicted
    assert predicted is not None and predicted.ttft == pytest.approx(0.8 * taught, rel=0.02)


@pytest.mark.parametrize("came", [0.1, 0.2, 5.0])
def test_what_was_known_to_be_late_teaches_only_that_it_was_not(came: float) -> None:
    """Learned one way only, from those that were quicker, predictions would become ever shorter."""
    policy, demand = Goodput(), wanting(tokens=1024, ttft=0.15)
    decision = choose(demand, worker("w", waiting_seconds=1.0, waiting_tokens=2000), policy=policy)
    assert decision.predicted is not None and decision.predicted.ttft > 1.0
    for _ in range(300):
        policy.observed(decision, ttft=came)
    learned = policy.calibration.first("w-life", decision.predicted.urgency, both=True).count
    assert learned == (300 if came <= 0.15 * LATE else 0)


def test_a_text_that_goes_on_is_due_at_no_time_that_predictions_know() -> None:
    policy, build = Goodput(), Build("model", "model")
    decision = choose(replace(wanting(), first_token_in=0.01, build=build), worker("w"), policy=policy)
    assert decision.predicted is not None and decision.predicted.due_in == math.inf
    policy.observed(decision, ttft=3.0)
    assert policy.calibration.first("w-life", decision.predicted.urgency, both=True).count == 1


@given(st.floats(1.0, 4.0))
@settings(max_examples=20)
def test_tokens_come_sooner_where_a_step_brings_several(accepted: float) -> None:
    """Drafts that are accepted: a factor of their own, which no observed TPOT has to make up for."""
    policy, here = Goodput(), worker("w", rows=4)
    decision = choose(wanting(), here, policy=policy)
    first = decision.predicted
    assert first is not None
    for _ in range(200):
        policy.observed(decision, step_tokens=accepted)
    then = choose(wanting(), here, policy=policy).predicted
    assert then is not None and then.step == first.step
    assert first.token / then.token == pytest.approx(accepted, rel=0.02)
    again = Calibration.from_kept(policy.calibration.kept())
    assert again.tokens_a_step("w-life") == pytest.approx(policy.calibration.tokens_a_step("w-life"))


def test_what_is_told_of_tpot_is_what_most_have_and_what_is_compared_the_mean() -> None:
    """Three texts of four are alone, one is joined by many: no request is told what none of them had."""
    policy, here = Goodput(), worker("w", rows=4)
    for number in range(400):
        decision = choose(wanting(), here, policy=policy)
        predicted = decision.predicted
        assert predicted is not None and predicted is decision.considered[0].predicted
        policy.observed(decision, tpot=0.010 if number % 4 else 0.030)
    assert predicted.tpot == pytest.approx(0.010**0.75 * 0.030**0.25, rel=0.1)
    assert predicted.usual_tpot == pytest.approx(0.010, rel=0.05)
    assert policy.calibration.usual_tpot(0, predicted.tpot, both=True) == predicted.tpot, "no text began alone"


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_what_is_usual_is_of_the_role_and_of_what_a_text_began_beside(role: Role) -> None:
    policy, both = Goodput(), role is Role.MIXED
    here = worker("d", role, leases=3)
    fleet = (here,) if both else (here, worker("p", Role.PREFILL))
    for _ in range(40):
        decision = choose(wanting(), *fleet, policy=policy)
        assert decision.decode is not None and decision.decode.held_leases == 3 and decision.mixed is both
        policy.observed(decision, tpot=0.020)
    kept = policy.calibration.kept()["usual"]
    assert [list(kinds) for kinds in kept] == ([[], ["2"]] if both else [["2"], []])
    guessed = choose(wanting(), worker("g", step_cost=replace(COST, samples=0)))
    (fresh := Goodput()).observed(guessed, tpot=0.020)
    assert fresh.calibration.kept()["usual"] == [{}, {}]


@given(st.lists(st.integers(1, 5), max_size=20))
def test_an_attempt_counts_the_steps_after_its_first_token(brought: list[int]) -> None:
    attempt = Attempt(Decision(None, None, "test"), 0.0)
    attempt.take(1, 1.0)
    for number, tokens in enumerate(brought):
        attempt.take(tokens, 2.0 + number)
    told = attempt.step_tokens
    assert told is None if sum(brought) < 3 else told == pytest.approx(sum(brought) / len(brought))


@given(st.integers(0, 1000), st.integers(2, 8), st.floats(0.05, 0.2))
@settings(max_examples=20)
def test_workers_are_told_apart_by_what_is_no_chance(seed: int, count: int, noise: float) -> None:
    """Observations come in runs of ten alike. Nobody is farther from all than it seemed; one that is slow is slow."""
    drawn = random.Random(seed)
    known, names = Calibration(), [f"w{n}" for n in range(count)]

    def observe(factors: dict[str, float]) -> None:
        for _ in range(25):
            for name in names:
                met = factors[name] * drawn.lognormvariate(0.0, noise)
                for _ in range(10):
                    known.first_token(name, 1.0, met)

    observe(dict.fromkeys(names, 1.2))
    every = known._first[False][0]._all.mean
    for name in names:
        assert abs(known.first(name).mean - every) <= abs(known._first[False][0]._own[name].mean - every) + 1e-9
    observe({name: 3.0 if name == "w0" else 1.0 for name in names})
    assert known.first("w0").factor > 1.5 * max(known.first(name).factor for name in names[1:])


def test_equal_workers_keep_one_factor() -> None:
    """Of 60 fleets of four, in few does chance tell any worker apart by more than a few per cent."""
    drawn, apart = random.Random(7), 0
    for _ in range(60):
        known, names = Calibration(), list("abcd")
        for _ in range(20):
            for name in names:
                met = drawn.lognormvariate(0.0, 0.25)
                for _ in range(10):
                    known.further_tokens(name, 1.0, met)
        factors = [known.further(name).factor for name in names]
        apart += max(factors) / min(factors) > 1.03
    assert apart <= 18


def test_what_is_beyond_numbers_has_no_chance() -> None:
    assert within(1.0, float("inf"), 0.3) == within(1.0, float("nan"), 0.3) == within(1e-300, 1e300, 0.3) == 0.0


def test_workers_without_number_take_bounded_memory() -> None:
    known = Calibration()
    for n in range(10_000):
        known.first_token(str(n), 1.0, 2.0)
    own = known._first[False][0]._own
    assert len(own) == MOST_WORKERS and own["9999"].count == 1


def test_one_strange_observation_does_not_decide() -> None:
    known = Calibration()
    for _ in range(50):
        known.first_token("w", 1.0, 1.0)
    known.first_token("w", 1.0, 1e6)
    assert known.first("w").factor < 1.2
    known.first_token("w", 0.0, 1.0)
    known.first_token("w", 1.0, 0.0)
    for n in range(5000):
        known.further_tokens(f"w{n}", 1.0, 1.0)
    assert len(known._further[False]._own) <= MOST_WORKERS


def test_links_learn_what_their_handoffs_cost() -> None:
    links = LinkCosts()
    for n in range(200):
        tokens = 100 + 37 * n % 3000
        links.observed("p", "d", tokens, 0.05 + 1e-4 * tokens)
    assert links.seconds("p", "d", 1000) == pytest.approx(0.15, rel=0.05)
    assert links.seconds("p", "d", 0) == pytest.approx(0.05, rel=0.2)
    assert links.seconds("q", "d", 1000) == pytest.approx(0.15, rel=0.05), "what all have is the best guess"
    links.retain({"q", "d"})
    for _ in range(100):
        links.observed("q", "d", 500, -1.0)
    assert links.seconds("q", "d", 500) == pytest.approx(0.0, abs=0.01)


def test_expected_outputs_follow_the_class() -> None:
    lengths = OutputLengths()
    assert lengths.expected("chat", 0, 1000) == 128 and lengths.expected("chat", 0, 10) == 10
    for _ in range(50):
        lengths.ended("chat", 40)
    assert lengths.expected("chat", 0, 1000) == pytest.approx(40, abs=3)
    assert 1 <= lengths.expected("chat", 200, 1000) <= 50
    assert lengths.expected("other", 0, 1000) == 128


@pytest.mark.parametrize(("pooling", "expected"), [(None, 1), (Pooling.LAST, 128)])
async def test_embeddings_teach_nothing_of_outputs(pooling: Pooling | None, expected: int) -> None:
    world = World()
    request = replace(wanted(max_tokens=1), pooling=pooling)
    state = RequestState(request=request, attempts=[Attempt(Decision(None, None, "tie"), 0.0)])
    tokens = () if pooling is not None else (7,)
    state.take(Delta(index=0, tokens=tokens, finish=FinishReason.STOP), 1.0)
    world.placer.learner.learn(state, world.placer.policy)
    assert world.placer.outputs.expected(request.service_class, 0, 1000) == expected
