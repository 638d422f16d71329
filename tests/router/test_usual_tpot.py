"""What a request is told of its TPOT: the middle of what texts had that began beside about as many."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.calibration import Calibration
from router.usual_tpot import LATEST, MOST_BESIDE, NEAR, SLOPE, UsualTpot

LATENCIES = st.floats(1e-4, 10.0)
TEXTS = st.lists(st.tuples(st.integers(0, 9), LATENCIES, LATENCIES), max_size=3 * LATEST)


def learned(texts: list[tuple[int, float, float]]) -> UsualTpot:
    """Of texts: how many were beside them, what was predicted, and what came."""
    found = UsualTpot()
    for beside, predicted, observed in texts:
        found.observe(beside, predicted, observed)
    return found


def kind(beside: int) -> int:
    return math.floor(math.log2(beside)) + 1 if beside else 0


@given(TEXTS, st.integers(0, 9), LATENCIES)
def test_it_is_the_median_of_the_latest_of_the_kind(
    texts: list[tuple[int, float, float]], beside: int, at: float
) -> None:
    alike = [(told, seen) for other, told, seen in texts if kind(other) == kind(beside)][-LATEST:]
    near = [(told, seen) for told, seen in alike if abs(math.log(at) - math.log(told)) <= NEAR]
    moved = [math.log(seen) + SLOPE * math.log(at / told) for told, seen in near]
    wanted = math.exp(statistics.median([*moved, math.log(at)]))
    assert learned(texts).at(beside, at) == pytest.approx(wanted, rel=1e-6)


def test_a_mean_of_few_long_ones_is_told_as_what_most_have() -> None:
    """Most texts are alone and take 10 ms, a quarter is joined by others and takes 22: the mean is 13."""
    draw = random.Random(3)
    texts = [(0, 0.013, draw.choice((0.010, 0.010, 0.010, 0.022))) for _ in range(60)]
    assert learned(texts).at(0, 0.013) == pytest.approx(0.010)


def test_what_began_beside_others_is_another_matter() -> None:
    """Batches grow tenfold at once: what small ones came to says nothing of them."""
    found = learned([(2, 0.010, 0.008)] * LATEST)
    assert found.at(2, 0.010) == found.at(3, 0.010) == pytest.approx(0.008)
    for beside in (0, 1, 4, 20, 10**9):
        assert found.at(beside, 0.100) == 0.100


def test_of_what_predictions_differ_by_a_part_is_noise() -> None:
    found = learned([(1, 0.010, 0.010)] * LATEST)
    assert found.at(1, 0.0144) == pytest.approx(0.012), "half of the logarithm"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.9])
def test_texts_that_take_far_longer_are_told_so(share: float) -> None:
    """Long contexts among short ones, or slow workers among quick ones, that nothing begins beside."""
    draw, found = random.Random(5), UsualTpot()
    for _ in range(300):
        predicted = 0.069 if draw.random() < share else 0.017
        found.observe(0, predicted, predicted * draw.lognormvariate(0.0, 0.03))
    for predicted in (0.017, 0.069):
        assert found.at(0, predicted) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(
    ("slow", "quick", "told"), [(15, 13, 0.012), (15, 15, 0.010), (15, 16, 0.008), (500, 16, 0.008)]
)
def test_the_thirty_latest_count(slow: int, quick: int, told: float) -> None:
    """Where as many were slower as were quicker, what is predicted lies between."""
    found = learned([(0, 0.010, 0.012)] * slow + [(0, 0.010, 0.008)] * quick)
    assert found.at(0, 0.010) == pytest.approx(told)


def test_it_forgets() -> None:
    found = learned([(0, 0.010, 0.005)] * 500 + [(0, 0.010, 0.020)] * LATEST)
    assert found.at(0, 0.010) == pytest.approx(0.020)
    assert [len(latest) for latest in found.kept().values()] == [LATEST]


def test_it_takes_bounded_memory() -> None:
    found = learned([(2**power, 0.01, 0.01) for power in range(63) for _ in range(40)])
    assert [len(latest) for latest in found.kept().values()] == [LATEST] * MOST_BESIDE
    assert found.at(-5, 0.01) == 0.01


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
        *({"0": wrong} for wrong in ([[None, 0.0]], 3, [4])),
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
