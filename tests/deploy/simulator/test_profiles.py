"""Costs of known models: DistServe's tables as its own simulator computes them, and what lies between their cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulator.profiles import PROFILES, Fitted, StepWork, profile_of

OPT13B = PROFILES["a100-opt13b"]


def prompts(*lengths: int) -> StepWork:
    work = StepWork()
    for length in lengths:
        work.add_prompt(0, length)
    return work


def test_a_prompt_takes_what_the_tables_say() -> None:
    """18.10 + 0.1019·512 + 7.12e-6·512² + 1 + 2 + 1e-4·512 = 75.2 ms; with two devices 53.5 ms."""
    assert OPT13B.seconds(prompts(512)) == pytest.approx(75.2e-3, abs=5e-5)
    assert PROFILES["a100-opt13b-tp2"].seconds(prompts(512)) == pytest.approx(53.5e-3, abs=5e-5)


def test_a_decode_step_takes_what_the_tables_say() -> None:
    """19.93 + 6.27e-4·32·513 + 0.0385·32 + 1 + 2 + 1e-4·32·513 ms, and the other row from 95 sequences on."""
    assert OPT13B.decode_seconds(32, 513) == pytest.approx(
        (19.9347 + 6.269e-4 * 32 * 513 + 0.038507 * 32 + 3 + 1e-4 * 32 * 513) / 1e3, rel=1e-4
    )
    assert OPT13B.decode_seconds(95, 100) == pytest.approx(
        (7.16619 + 5.798e-4 * 9500 + 0.158311 * 95 + 3 + 1e-4 * 9500) / 1e3, rel=1e-4
    )


@pytest.mark.parametrize("name", PROFILES)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), max_size=4),
    decoding=st.integers(0, 60),
    context=st.integers(1, 1000),
)
def test_more_work_never_takes_less(name: str, chunks: list[tuple[int, int]], decoding: int, context: int) -> None:
    profile = PROFILES[name]
    work = StepWork(decoding=decoding, decoding_context=decoding * context)
    before = profile.seconds(work)
    for start, count in chunks:
        work.add_prompt(start, count)
        assert profile.seconds(work) >= before
        before = profile.seconds(work)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), max_size=4), st.integers(0, 60))
def test_the_load_counts_what_workers_count(chunks: list[tuple[int, int]], decoding: int) -> None:
    from serving.step_cost import StepLoad

    work, expected = StepWork(decoding=decoding, decoding_context=decoding * 100), StepLoad()
    for start, count in chunks:
        work.add_prompt(start, count)
        expected += StepLoad.of(start, count)
    for _ in range(decoding):
        expected += StepLoad.of(99, 1)
    assert work.load == expected


def test_the_cpus_profile_is_near_what_was_measured() -> None:
    """bench/results of 2026-11-20, bfloat16: TTFT less the API's 3 ms, TPOT of one sequence of 256 to 384 tokens.

    With 8 and 32 clients, a cycle of 127 steps and a prompt each took 1.38 and 4.47 s.
    """
    cpu = PROFILES["cpu-smollm2"]
    assert cpu.prompt_seconds(256) == pytest.approx(0.0713 - 0.003, rel=0.06)
    assert cpu.prompt_seconds(2048) == pytest.approx(0.6937 - 0.003, rel=0.06)
    assert cpu.decode_seconds(1, 320) == pytest.approx(3.62e-3, rel=0.06)
    for clients, cycle in ((8, 1.380), (32, 4.467)):
        took = 127 * cpu.decode_seconds(clients, 320) + clients * cpu.prompt_seconds(256)
        assert took == pytest.approx(cycle, rel=0.06)


@pytest.mark.parametrize("name", PROFILES)
def test_the_workers_form_comes_near_every_profile(name: str) -> None:
    profile = PROFILES[name]
    cost = profile.fitted()
    assert min(cost.fixed, cost.token, cost.pair, cost.sequence, cost.context) >= 0
    assert cost.error < 0.12
    for work in (prompts(512), StepWork(decoding=16, decoding_context=16 * 400)):
        assert cost.seconds(work.load) == pytest.approx(profile.seconds(work), rel=0.2)


def test_a_profile_in_the_workers_form_is_fitted_exactly() -> None:
    cost, known = PROFILES["cpu-smollm2"].fitted(), PROFILES["cpu-smollm2"].steps
    assert isinstance(known, Fitted)
    assert cost.error < 1e-6
    assert cost.token == pytest.approx(known.cost.token) and cost.pair == pytest.approx(known.cost.pair)


def test_kv_holds_what_the_tables_say() -> None:
    assert (OPT13B.kv_tokens, OPT13B.kv_bytes) == (66_144, 819_200)
    assert PROFILES["a100-opt66b-tp4"].kv_bytes == 2 * 2 * 9216 * 64


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(ValueError, match="h100"):
        profile_of("h100")
