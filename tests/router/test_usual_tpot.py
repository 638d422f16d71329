"""What a request is told of its TPOT: where most texts lay that began beside about as many."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.calibration import Calibration
from router.usual_tpot import LATEST, UsualTpot, densest

LATENCIES = st.floats(1e-4, 10.0)
TEXTS = st.lists(st.tuples(st.integers(0, 9), LATENCIES, LATENCIES), max_size=4 * LATEST)
WEIGHTED = st.lists(st.tuples(st.floats(-5.0, 5.0), st.floats(1e-3, 2.0)), min_size=1, max_size=30)


def learned(texts: list[tuple[int, float, float]]) -> UsualTpot:
    """Of texts: how many were beside them, what was predicted, and what came."""
    found = UsualTpot()
    for beside, predicted, observed in texts:
        found.observe(beside, predicted, observed)
    return found


def kind(beside: int) -> int:
    return math.floor(math.log2(beside)) + 1 if beside else 0


@given(WEIGHTED, st.floats(0.1, 1.0))
def test_the_densest_range_is_the_narrowest_with_that_share(counted: list[tuple[float, float]], share: float) -> None:
    """Of all ranges from a value to another."""
    whole = sum(weight for _, weight in counted)
    values = sorted(value for value, _ in counted)
    widths = {}
    for low in values:
        for high in values:
            inside = sum(weight for value, weight in counted if low <= value <= high)
            if low <= high and inside >= share * whole * (1 - 1e-6):
                widths[(low + high) / 2] = high - low
    found = densest(counted, share)
    assert found in widths and widths[found] <= min(widths.values()) + 1e-12


def test_of_several_as_narrow_the_lowest_is_taken() -> None:
    assert densest([(0.0, 1.0), (1.0, 1.0), (5.0, 1.0), (6.0, 1.0)], 0.5) == 0.5
    assert densest([(3.0, 0.1)]) == 3.0
    assert densest([(1.0, 1.0), (1.0, 2.0), (9.0, 0.5)]) == 1.0


@pytest.mark.parametrize("first", range(7))
def test_a_share_that_is_a_sum_of_weights_is_reached(first: int) -> None:
    """Four of ten weights of 0.1, wherever they are, which as floats sum up to less than 0.4 of all, or to more."""
    values = [1000.0 * place for place in range(10)]
    values[first : first + 4] = [values[first] + place for place in range(4)]
    assert densest([(value, 0.1) for value in values], 0.4) == values[first] + 1.5


@given(TEXTS, st.integers(0, 9), LATENCIES)
def test_it_is_the_densest_of_the_latest_of_the_kind(
    texts: list[tuple[int, float, float]], beside: int, at: float
) -> None:
    counted = [(math.log(at), 1.0)]
    alike = [(told, seen) for other, told, seen in reversed(texts) if kind(other) == kind(beside)][:30]
    for told, seen in alike:
        apart = math.log(at) - math.log(told)
        if abs(apart) <= math.log(2.0):
            moved = math.copysign(max(0.0, abs(apart) - 0.2), apart)
            counted.append((math.log(seen) + moved, 0.5 ** ((len(counted) - 1) / 12)))
    assert learned(texts).at(beside, at) == pytest.approx(math.exp(densest(counted, 0.6)), rel=1e-6)


def test_a_mean_of_few_long_ones_is_told_as_what_most_have() -> None:
    """Most texts are alone and take 10 ms, a quarter is joined by others and takes 22: the mean is 13."""
    draw = random.Random(3)
    texts = [(0, 0.013, draw.choice((0.010, 0.010, 0.010, 0.022))) for _ in range(60)]
    assert learned(texts).at(0, 0.013) == pytest.approx(0.010)


def test_more_texts_are_near_to_it_than_to_their_median() -> None:
    """Of a skewed distribution, as what others cost a text is: within a tenth lie a quarter more."""
    draw = random.Random(7)
    took = [0.010 * (1 + draw.expovariate(1 / 0.4)) for _ in range(2000)]
    told = learned([(0, 0.014, seconds) for seconds in took[:LATEST]]).at(0, 0.014)
    median = sorted(took)[len(took) // 2]
    near, near_median = (sum(abs(one / seconds - 1) <= 0.1 for seconds in took) for one in (told, median))
    assert near > 1.2 * near_median


def test_what_began_beside_others_is_another_matter() -> None:
    """Batches grow tenfold at once: what small ones came to says nothing of them."""
    found = learned([(2, 0.010, 0.008)] * LATEST)
    assert found.at(2, 0.010) == found.at(3, 0.010) == pytest.approx(0.008)
    for beside in (0, 1, 4, 20, 10**9):
        assert found.at(beside, 0.010) == 0.010


def test_a_kind_that_is_rare_is_told_what_it_has() -> None:
    """One text of twenty begins beside another and takes 1.6 times as long, which no prediction knows."""
    draw, found = random.Random(5), UsualTpot()
    for number in range(800):
        beside = int(number % 20 == 7)
        found.observe(beside, 0.010, (0.016 if beside else 0.010) * draw.lognormvariate(0.0, 0.03))
    assert found.at(1, 0.010) == pytest.approx(0.016, rel=0.05)
    assert found.at(0, 0.010) == pytest.approx(0.010, rel=0.05)


def test_what_predictions_differ_by_little_is_noise() -> None:
    found = learned([(1, 0.010, 0.010)] * LATEST)
    assert found.at(1, 0.012) == found.at(1, 0.0085) == pytest.approx(0.010)
    assert found.at(1, 0.018) == pytest.approx(0.018 / math.exp(0.2)), "the rest is not"
    assert found.at(1, 0.006) == pytest.approx(0.006 * math.exp(0.2))
    assert found.at(1, 0.021) == 0.021 and found.at(1, 0.0049) == 0.0049, "nothing near was predicted"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.9])
def test_texts_that_take_far_longer_are_told_so(share: float) -> None:
    """Long contexts among short ones, or slow workers among quick ones, that nothing begins beside."""
    draw, found = random.Random(5), UsualTpot()
    for _ in range(300):
        predicted = 0.069 if draw.random() < share else 0.017
        found.observe(0, predicted, predicted * draw.lognormvariate(0.0, 0.03))
    for predicted in (0.017, 0.069):
        assert found.at(0, predicted) == pytest.approx(predicted, rel=0.05)


def test_the_prediction_itself_counts_as_one() -> None:
    assert learned([(0, 0.010, 0.012)]).at(0, 0.010) == pytest.approx(math.sqrt(0.010 * 0.012))
    assert learned([(0, 0.010, 0.012)] * 3).at(0, 0.010) == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("at", "quick", "told"),
    [
        *((0.010, 6, 0.020), (0.010, 7, 0.010 * math.sqrt(2.0)), (0.010, 11, 0.010 * math.sqrt(2.0))),
        *((0.010, 12, 0.010), (0.010, 30, 0.010)),
        *((0.020, 7, 0.020), (0.020, 13, 0.010)),
    ],
)
def test_a_change_is_told_after_a_dozen_texts(at: float, quick: int, told: float) -> None:
    """While neither weighs three fifths, what is told lies between."""
    found = learned([(0, at, 0.020)] * 500 + [(0, at, 0.010)] * quick)
    assert found.at(0, at) == pytest.approx(told)


@pytest.mark.parametrize("share", [10, 20])
def test_texts_age_by_those_that_count(share: int) -> None:
    """Long contexts among many short ones, which all begin alone, take 1.4 times as long as predicted."""
    draw, found = random.Random(5), UsualTpot()
    for number in range(800):
        predicted, factor = (0.05, 1.4) if number % share == 7 else (0.01, 1.0)
        found.observe(0, predicted, predicted * factor * draw.lognormvariate(0.0, 0.03))
    assert found.at(0, 0.05) == pytest.approx(0.07, rel=0.1 if share == 10 else 0.2)


def test_each_of_the_latest_counts_by_its_age() -> None:
    """Each takes 1.1 times as long as the one before, so that what is told says which of them count, and how much."""
    took = [0.010 * 1.1**place for place in range(40)]
    weights = [0.5 ** (age / 12) for age in range(30)]
    counted = [*zip(map(math.log, reversed(took)), weights, strict=False), (math.log(0.18), 1.0)]
    assert learned([(0, 0.18, seconds) for seconds in took]).at(0, 0.18) == pytest.approx(
        math.exp(densest(counted, 0.6)), rel=1e-9
    )


def test_it_forgets() -> None:
    found = learned([(0, 0.010, 0.005)] * 500 + [(0, 0.010, 0.020)] * LATEST)
    assert found.at(0, 0.010) == pytest.approx(0.020)
    assert [len(latest) for latest in found.kept().values()] == [30]


def test_it_takes_bounded_memory() -> None:
    found = learned([(2**power, 0.01, 0.01) for power in range(63) for _ in range(40)])
    assert {int(kind): len(latest) for kind, latest in found.kept().items()} == dict.fromkeys(range(1, 17), 30)
    assert found.at(-5, 0.01) == 0.01 and not learned([(-5, 0.01, 0.01)]).kept().keys() - {"0"}


@given(TEXTS, st.integers(0, 9), LATENCIES)
def test_it_is_kept(texts: list[tuple[int, float, float]], beside: int, at: float) -> None:
    found = learned(texts)
    again = UsualTpot.from_kept(found.kept())
    assert again.at(beside, at) == found.at(beside, at) and again.kept() == found.kept()


@pytest.mark.parametrize("predicted", [0.0, -1.0, math.inf, math.nan, 1e-300, 1e300, 0.01])
@pytest.mark.parametrize("observed", [0.0, -1.0, math.inf, math.nan, 1e-300, 1e300])
def test_what_is_no_latency_is_left_out(predicted: float, observed: float) -> None:
    assert not learned([(0, predicted, observed), (0, observed, predicted)]).kept()


@pytest.mark.parametrize("at", [0.0, -1.0, math.inf])
def test_what_predicts_nothing_is_told_as_it_is(at: float) -> None:
    assert learned([(0, 0.01, 0.02)]).at(0, at) == at


@pytest.mark.parametrize(
    "kept",
    [
        *({"0": wrong} for wrong in ([[1.0]], [[1.0, 2.0, 3.0]], [[math.nan, 0.0]], [[0.0, math.inf]], [["a", 0.0]])),
        *({"0": wrong} for wrong in ([[None, 0.0]], [[20.5, 0.0]], [[0.0, -20.5]], 3, [4])),
        *({name: [[0.0, 0.0]]} for name in ("-1", "17", "none", "1.5")),
        *(3, [[0.0, 0.0]]),
    ],
)
def test_what_was_not_kept_by_it_is_refused(kept: object) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        UsualTpot.from_kept(kept)  # type: ignore[arg-type]


def test_workers_that_do_both_are_apart() -> None:
    known = Calibration()
    for _ in range(LATEST):
        known.text_took(2, 0.010, 0.020)
    assert known.usual_tpot(2, 0.010) == pytest.approx(0.020) and known.usual_tpot(2, 0.010, both=True) == 0.010
    again = Calibration.from_kept(known.kept())
    assert again.usual_tpot(2, 0.010) == known.usual_tpot(2, 0.010)
    for wrong in ([], [{}], [{}, {}, {}]):
        with pytest.raises(ValueError, match="usual TPOTs"):
            Calibration.from_kept(known.kept() | {"usual": wrong})
