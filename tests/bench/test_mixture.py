"""Mixtures: what stays equal between runs, what does not, and which request met what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mixture import MIXTURES, Mixture, RequestKind, mixture_of
from bench.sse import Outcome
from bench.summary import SloTargets

names = st.sampled_from(sorted(MIXTURES))


def ended(kind: str, ttft: float, tpot: float, error: str | None = None) -> Outcome:
    last = ttft + 10 * tpot
    return Outcome(prompt_tokens=1, max_tokens=11, kind=kind, first=ttft, last=last, reported=11, error=error)


@given(name=names, rate=st.floats(0.1, 50), seed=st.integers(0, 2**31), count=st.integers(2, 40))
def test_a_rate_only_stretches_the_arrivals(name: str, rate: float, seed: int, count: int) -> None:
    mixture = mixture_of(name)
    one, other = mixture.timed(1.0, count, seed=seed), mixture.timed(rate, count, seed=seed)
    assert [(asked.kind, asked.ask) for asked in one] == [(asked.kind, asked.ask) for asked in other]
    assert [asked.at / rate for asked in one] == pytest.approx([asked.at for asked in other])


@given(name=names, seed=st.integers(0, 2**31), short=st.integers(1, 20), more=st.integers(1, 20))
def test_a_longer_run_begins_with_the_requests_of_a_shorter_one(name: str, seed: int, short: int, more: int) -> None:
    mixture = mixture_of(name)
    lengths = [(kind.name, len(ask.pieces), ask.output_tokens) for kind, ask in mixture.asks(short + more, seed=seed)]
    begun = [(kind.name, len(ask.pieces), ask.output_tokens) for kind, ask in mixture.asks(short, seed=seed)]
    assert lengths[:short] == begun


def test_runs_share_their_texts_and_nothing_else() -> None:
    kind = RequestKind(name="k", prompt_tokens=12, output_tokens=3, prefix_tokens=8, prefix_texts=2)
    mixture = Mixture(name="m", kinds=(kind,))
    first = [ask.pieces for _, ask in mixture.asks(30, seed=1, fresh=(1,))]
    second = [ask.pieces for _, ask in mixture.asks(30, seed=1, fresh=(2,))]
    assert {pieces[:8] for pieces in first} == {pieces[:8] for pieces in second}
    assert len({pieces[:8] for pieces in first}) == 2
    assert [len(pieces) for pieces in first] == [12] * 30
    assert not {pieces[8:] for pieces in first} & {pieces[8:] for pieces in second}


def test_a_prompt_is_longer_than_the_text_it_shares() -> None:
    kind = RequestKind(name="k", prompt_tokens=9, prefix_tokens=8, spread=1.0)
    asks = Mixture(name="m", kinds=(kind,)).asks(50, seed=0)
    assert min(len(ask.pieces) for _, ask in asks) == 9


def test_kinds_come_by_their_shares_and_are_judged_by_their_own_objectives() -> None:
    quick = RequestKind(name="quick", share=3, slo=SloTargets(ttft_ms=100, tpot_ms=10), service_class="interactive")
    slow = RequestKind(name="slow", share=1, slo=SloTargets(ttft_ms=1000))
    mixture = Mixture(name="m", kinds=(quick, slow))
    kinds = [kind.name for kind, _ in mixture.asks(4000, seed=3)]
    assert kinds.count("quick") / 4000 == pytest.approx(0.75, abs=0.03)
    assert mixture.met(ended("quick", 0.09, 0.009)) and mixture.met(ended("slow", 0.9, 9.0))
    assert not mixture.met(ended("quick", 0.11, 0.009)) and not mixture.met(ended("quick", 0.09, 0.011))
    assert not mixture.met(ended("slow", 0.9, 9.0, error="HTTP 429"))
    assert mixture.scaled(2).met(ended("quick", 0.19, 0.019)) and not mixture.scaled(0.5).met(ended("slow", 0.6, 0))
    assert quick.fields() == {"ttft_slo_ms": 100, "tpot_slo_ms": 10, "service_class": "interactive"}
    assert slow.fields() == {"ttft_slo_ms": 1000}
    assert mixture.describe().startswith("75% quick 256/64, TTFT 100 ms and TPOT 10 ms; 25% slow")


def test_low_rates_still_send_a_few_requests() -> None:
    assert [MIXTURES["chat"].count(rate, 30) for rate in (0.05, 4.0)] == [12, 120]


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        Mixture(name="m", kinds=(RequestKind(name="a"), RequestKind(name="a")))
    with pytest.raises(ValueError, match="no workload 'chats', but chat"):
        mixture_of("chats")


def test_a_kind_may_repeat_itself() -> None:
    kind = RequestKind(name="edit", prompt_tokens=100, repeats=8)
    ((_, ask),) = Mixture(name="edits", kinds=(kind,)).asks(1, seed=0)
    assert len(ask.pieces) == 100 and ask.pieces[:13] * 7 == ask.pieces[:91] and len(set(ask.pieces)) > 6
