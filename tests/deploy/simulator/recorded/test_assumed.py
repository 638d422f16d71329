"""DistServe's simulator as a configuration of ours gives the outputs that are known of it."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.simulator.recorded_assumed import assumed_colocated, assumed_split
from deploy.simulator.recorded_replay import replay
from deploy.simulator.recorded_systems import RecordedSystem
from deploy.simulator.traffic import Arrival
from serving.messages import Request, SamplingParams

REQUESTS, PROMPT, OUTPUT = 600, 512, 64


def arrivals(skip: int, rate: float) -> list[Arrival]:
    """Poisson, the first at 0, from the gaps behind `skip` others: those that the outputs below were made with.

    The reference draws all output tokens by decoding; here the prompt's step draws one more before them.
    """
    gaps = np.random.default_rng(1234).exponential(1.0, skip + REQUESTS - 1)[skip:] / rate
    times = [0.0, *np.cumsum(gaps).tolist()]
    sampling = SamplingParams(max_tokens=OUTPUT + 1, temperature=0.0)
    return [
        Arrival(at, Request(request_id=str(number), prompt=(7,) * PROMPT, sampling=sampling), OUTPUT + 1)
        for number, at in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("system", "skip", "rate", "ttft", "tpot"),
    [
        pytest.param(assumed_split(), 0, 3.0, (88.7, 134.5, 233.5), (24.66, 25.96), id="p11-d11"),
        pytest.param(assumed_split("a100-opt13b-tp2"), 599, 6.0, (64.1, 95.3, 160.0), (26.72, 28.10), id="p21-d11"),
        pytest.param(assumed_colocated(), 599, 6.0, (170.7, 268.5, 414.6), (84.30, 103.6), id="vllm-tp1"),
    ],
)
def test_its_outputs_are_met(
    system: RecordedSystem, skip: int, rate: float, ttft: tuple[float, ...], tpot: tuple[float, ...]
) -> None:
    """Mean, p90 and p99 of TTFT, mean and p90 of TPOT, in milliseconds; OPT-13B, 512 tokens in and 64 out."""
    outcomes = replay(system, arrivals(skip, rate)).outcomes
    ttfts = [1e3 * outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    tpots = [
        1e3 * (each.last_token - each.first_token) / OUTPUT for each in outcomes if each.last_token and each.first_token
    ]
    assert len(ttfts) == len(tpots) == REQUESTS
    assert (np.mean(ttfts), *np.quantile(ttfts, [0.9, 0.99])) == pytest.approx(ttft, rel=0.01)
    assert (np.mean(tpots), np.quantile(tpots, 0.9)) == pytest.approx(tpot, rel=0.01)
