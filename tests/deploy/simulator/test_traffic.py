"""Traces: the same seed gives the same, another rate only stretches them, lengths and prefixes are as asked."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.mixture import MIXTURES
from deploy.simulator.profiles import PROFILES
from deploy.simulator.traffic import TRAFFIC, Lengths, Traffic, TrafficClass, arrivals, drawn, trace, traffic_of
from serving.service_class import SERVICE_CLASSES

PROFILE = PROFILES["a100-opt13b"]


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_same_seed_gives_the_same_trace_and_another_does_not(name: str) -> None:
    first, second, other = (trace(TRAFFIC[name], PROFILE, 50, seed) for seed in (1, 1, 2))
    assert first == second
    assert [each.request.prompt for each in first] != [each.request.prompt for each in other]


@pytest.mark.parametrize("name", TRAFFIC)
def test_every_request_fits_the_model_and_has_objectives(name: str) -> None:
    for each in trace(TRAFFIC[name], PROFILE, 300, 5):
        assert len(each.request.prompt) > 0
        assert 0 < each.output_tokens == each.request.sampling.max_tokens
        assert len(each.request.prompt) + each.output_tokens < PROFILE.max_model_len
        assert each.request.slo.ttft_ms is not None and each.request.slo.tpot_ms is not None


@given(st.integers(2, 200), st.floats(0.3, 4), st.integers(0, 5))
def test_arrivals_come_one_a_second_in_order(count: int, burstiness: float, seed: int) -> None:
    times = arrivals(count, burstiness, seed)
    assert len(times) == count and times == sorted(times)
    assert times[0] == 0 and times[-1] == pytest.approx(count - 1)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_gaps_vary_as_much_as_asked(burstiness: float) -> None:
    times = arrivals(20_000, burstiness, 1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness, rel=0.05)


@settings(max_examples=40)
@given(st.floats(20, 800), st.floats(0, 0.8))
def test_lengths_have_the_mean_they_are_given(mean: float, spread: float) -> None:
    import numpy as np

    lengths = Lengths(mean, spread, most=1_000_000).draw(np.random.default_rng(3), 20_000)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.06)
    assert spread > 0 or set(lengths) == {round(mean)}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_real_processes_are_asked_can_be_simulated(name: str) -> None:
    mixture, simulated = MIXTURES[name], TRAFFIC[f"bench-{name}"]
    for kind, made in zip(mixture.kinds, simulated.classes, strict=True):
        assert (made.share, made.prefix_tokens, made.prefix_groups) == (
            kind.share,
            kind.prefix_tokens,
            kind.prefix_texts,
        )
        slo = made.objectives(PROFILES["cpu-smollm2-int8"])
        assert (slo.ttft_ms, slo.tpot_ms) == (kind.slo.ttft_ms, kind.slo.tpot_ms)
        assert made.prompt == Lengths(kind.prompt_tokens, kind.spread)
        assert made.output == Lengths(kind.output_tokens, kind.spread)
        assert made.priority == SERVICE_CLASSES[made.name].priority


def test_classes_come_in_their_shares() -> None:
    kinds = [each.kind for each in drawn(TRAFFIC["long-mixed"], PROFILE, 2000, 1)]
    assert TRAFFIC["long-mixed"].classes[0].name == "interactive"
    assert kinds.count(0) / len(kinds) == pytest.approx(0.7, abs=0.04)


def test_prefixes_are_shared_and_some_are_more_popular() -> None:
    kind = TrafficClass(prompt=Lengths(200), output=Lengths(5), prefix_tokens=100, prefix_groups=10, prefix_skew=1.0)
    asked = trace(Traffic(name="shared", classes=(kind,)), PROFILE, 1000, 1)
    starts = [each.request.prompt[:100] for each in asked]
    counts = sorted((starts.count(start) for start in set(starts)), reverse=True)
    assert len(counts) == 10
    assert counts[0] / counts[-1] > 4
    assert len({each.request.prompt[100:] for each in asked}) == 1000


def test_clients_may_ask_for_more_than_there_will_be() -> None:
    asked = trace(TRAFFIC["chat"], PROFILE, 50, 1, max_tokens=600)
    assert all(each.request.sampling.max_tokens == 600 > each.output_tokens for each in asked)


def test_objectives_are_multiples_of_the_profiles_times_unless_given() -> None:
    kind = TrafficClass(prompt=Lengths(512), output=Lengths(9), ttft_slowdown=2.0, tpot_slowdown=3.0)
    slo = kind.objectives(PROFILE)
    assert slo.ttft_ms == pytest.approx(2 * 75.2, abs=0.1)
    assert slo.tpot_ms == pytest.approx(3e3 * PROFILE.decode_seconds(1, 512))
    given_ms = Traffic(name="x", classes=(kind,)).with_objectives(7.0, None).classes[0].objectives(PROFILE)
    assert (given_ms.ttft_ms, given_ms.tpot_ms) == (7.0, slo.tpot_ms)


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ValueError, match="chatty"):
        traffic_of("chatty")
