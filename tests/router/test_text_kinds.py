"""How many tokens a step a text will get: by its worker, and by the kinds it is of, as far as these are no chance."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration import MOST_TOKENS, MOST_WORKERS, Calibration
from router.goodput import Goodput
from router.text_kinds import LOOKED_AT, REPEATING, repetition, text_kinds
from tests.router.test_goodput import choose, wanting, worker

CHAT, EDIT = ("chat 7 0", "", ""), ("edit 7 2", "", "")


def learned(kinds: dict[tuple[str, ...], float], *, spread: float, count: int, seed: int = 0) -> Calibration:
    """Texts of each kind in turn, whose tokens a step are lognormal around these."""
    known, drawn = Calibration(), random.Random(seed)
    for _ in range(count):
        for kind, tokens in kinds.items():
            known.steps_took("w", max(1.0, tokens * drawn.lognormvariate(0.0, spread)), kind)
    return known


def test_texts_that_accept_more_drafts_are_told_apart() -> None:
    known = learned({CHAT: 1.4, EDIT: 3.2}, spread=0.2, count=40)
    assert known.tokens_a_step("w", known.apart(CHAT)) == pytest.approx(1.4, rel=0.1)
    assert known.tokens_a_step("w", known.apart(EDIT)) == pytest.approx(3.2, rel=0.1)
    between = known.tokens_a_step("w")
    assert known.tokens_a_step("w", known.apart(("new 7 0", "", ""))) == pytest.approx(between), (
        "nothing is known of it"
    )
    assert 1.6 < between < 2.8


def test_what_chance_makes_of_kinds_alike_is_not_believed() -> None:
    """Of 60 times, in few are equal kinds told apart by more than a few per cent."""
    apart = 0
    for seed in range(60):
        known = learned({(f"k{n}", "", ""): 2.0 for n in range(4)}, spread=0.25, count=20, seed=seed)
        found = [known.tokens_a_step("w", known.apart((f"k{n}", "", ""))) for n in range(4)]
        apart += max(found) / min(found) > 1.05
    assert apart <= 12


def test_a_finer_kind_learns_what_the_coarser_leave() -> None:
    """A conversation that repeats itself more than its class does; the class is not counted twice."""
    kinds = {("chat", "", f"s{n}"): 1.5 * (2.0 if n == 0 else 1.0) for n in range(4)}
    kinds |= {("edit", "", f"e{n}"): 3.0 for n in range(4)}
    known = learned(kinds, spread=0.1, count=40)
    assert known.tokens_a_step("w", known.apart(("chat", "", "s0"))) == pytest.approx(3.0, rel=0.2)
    assert known.tokens_a_step("w", known.apart(("chat", "", "s1"))) == pytest.approx(1.5, rel=0.2)
    assert known.tokens_a_step("w", known.apart(("edit", "", "e1"))) == pytest.approx(3.0, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_predictions_stay_within_what_a_step_can_bring(seed: int) -> None:
    drawn, known = random.Random(seed), Calibration()
    names = [tuple(drawn.choice(("", "a", "b", "c")) for _ in range(3)) for _ in range(8)]
    for _ in range(100):
        known.steps_took(drawn.choice("vw"), drawn.choice((1.0, 5.0, drawn.uniform(0.0, 99.0))), drawn.choice(names))
        told = known.tokens_a_step(drawn.choice("vwx"), known.apart(drawn.choice(names)))
        assert 1.0 <= told <= MOST_TOKENS and math.isfinite(told)


def test_kinds_outlive_a_restart_and_take_bounded_memory() -> None:
    known = learned({CHAT: 1.4, EDIT: 3.2}, spread=0.2, count=40)
    again = Calibration.from_kept(known.kept())
    assert [again.tokens_a_step("w", again.apart(kind)) for kind in (CHAT, EDIT)] == [
        pytest.approx(known.tokens_a_step("w", known.apart(kind))) for kind in (CHAT, EDIT)
    ]
    for n in range(3 * MOST_WORKERS):
        known.steps_took("w", 2.0, ("chat", "", f"session-{n}"))
    assert len(known._texts[2]._own) <= MOST_WORKERS
    with pytest.raises(ValueError, match="kinds of texts"):
        Calibration.from_kept(known.kept() | {"texts": []})


def test_a_request_is_predicted_by_its_own_kind_and_others_by_the_usual() -> None:
    policy, here = Goodput(), worker("w", rows=4)
    for _ in range(60):
        for kind, tokens in ((CHAT, 1.0), (EDIT, 4.0)):
            decision = choose(replace(wanting(), texts=kind), here, policy=policy)
            policy.observed(decision, step_tokens=tokens)
    chat, edit = (choose(replace(wanting(), texts=kind), here, policy=policy).predicted for kind in (CHAT, EDIT))
    assert chat is not None and edit is not None and chat.step == edit.step
    assert chat.token / edit.token == pytest.approx(4.0, rel=0.1)


def test_a_prompt_repeats_itself() -> None:
    drawn = random.Random(3)
    plain = [drawn.randrange(50_000) for _ in range(400)]
    assert repetition(plain) == 0
    assert repetition(plain + plain[:100]) == 1
    assert repetition(plain[:200] * 2) == 2
    assert repetition(plain[:20] * 20) == len(REPEATING)
    assert repetition(plain[:20] * 20 + [drawn.randrange(50_000) for _ in range(LOOKED_AT)]) == 0, "only its end counts"
    assert repetition([]) == repetition([1, 2]) == 0


def test_kinds_are_named_from_coarse_to_fine() -> None:
    coarse, client, session = text_kinds("standard", 100, 1, "key", "talk")
    assert coarse == "standard 7 1" and client and session and client != session
    assert text_kinds("standard", 100, 1, "", "") == ("standard 7 1", "", ""), "of none"
    assert "key" not in client and "talk" not in session, "they are kept in a file"
    assert text_kinds("standard", 64, 1, "key", "talk") == text_kinds("standard", 127, 1, "key", "talk")
    assert text_kinds("standard", 0, 0, "", "")[0] == "standard 1 0"
