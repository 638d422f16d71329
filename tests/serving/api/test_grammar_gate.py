"""What one client sends into threads and processes holds up its own requests, and no others."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api import grammar_gate
from serving.api.fair_slots import FairSlots
from serving.api.grammar_gate import GrammarGate, Lane
from serving.api.plan import OutputForm
from serving.errors import InvalidRequest, Overloaded, Unavailable
from serving.grammar.forms import choice_grammar, written_grammar
from serving.grammar.grammars import GrammarError
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying
from tests.serving.grammar.test_vetting import LONG, LONGER


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_clients_take_turns() -> None:
    slots, order = FairSlots(1, per_client=1, most_waiting=9), list[str]()

    async def work(client: str) -> None:
        await slots.take(client)
        order.append(client)
        await turns()
        slots.give_back(client)

    await asyncio.gather(*map(work, ["a", "a", "a", "a", "b", "b", "c"]))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


async def test_one_client_has_not_all_of_them() -> None:
    slots = FairSlots(2, per_client=1, most_waiting=1)
    await slots.take("a")
    waiting = asyncio.create_task(slots.take("a"))
    await turns()
    assert not waiting.done()
    await asyncio.wait_for(slots.take("b"), 60)
    with pytest.raises(Overloaded) as refused:
        await slots.take("a")
    assert refused.value.retry_after
    slots.give_back("a")
    await asyncio.wait_for(waiting, 60)


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "leave", "end"])), max_size=60),
    slots=st.integers(1, 3),
)
def test_no_slot_is_lost(steps: list[tuple[str, str]], slots: int) -> None:
    """Whoever takes, waits, leaves and ends in whatever order: as many as may have slots, and all are free at last."""

    async def run() -> None:
        fair, tasks = FairSlots(slots, per_client=max(1, slots - 1), most_waiting=99), list[tuple[str, asyncio.Task]]()
        for client, step in steps:
            of_client = [found for found in tasks if found[0] == client]
            held = [found for found in of_client if found[1].done()]
            if step == "take":
                tasks.append((client, asyncio.create_task(fair.take(client))))
            elif step == "leave" and len(held) < len(of_client):
                left = next(found for found in of_client if not found[1].done())
                left[1].cancel()
                tasks.remove(left)
            elif step == "end" and held:
                fair.give_back(client)
                tasks.remove(held[0])
            await turns()
            assert sum(task.done() for _, task in tasks) <= slots
        while tasks:
            await turns()
            held = [found for found in tasks if found[1].done()]
            assert held, "somebody waits, and nobody has a slot"
            fair.give_back(held[0][0])
            tasks.remove(held[0])
        assert fair._free == slots and not fair._taken and not len(fair._waiting)

    asyncio.run(run())


async def test_work_goes_on_when_its_client_has_left() -> None:
    """Its slot is free when it has ended, not before."""
    lane, go, ended = Lane("test", 1, per_client=1, most_waiting=9), threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        ended.set()

    first = asyncio.create_task(lane.run("a", work))
    await turns()
    first.cancel()
    second = asyncio.create_task(lane.run("b", ended.is_set))
    await turns()
    assert not second.done()
    go.set()
    assert await asyncio.wait_for(second, 60)


async def test_costly_grammars_hold_up_their_own_client_alone(tokenizer: Tokenizer) -> None:
    """Beside a queue of them another client's grammars are tried."""
    gate = GrammarGate(tokenizer, 0.2)
    costly = [OutputForm(written_grammar(LONG) + f"\nB{i}: /b/", "guided_grammar") for i in range(9)]
    bad = [asyncio.create_task(gate.check("bad", form)) for form in costly]
    await turns()
    for number in range(3):
        await gate.check("good", OutputForm(choice_grammar([str(number)]), "x"))
    assert not bad[-1].done()
    with pytest.raises(InvalidRequest, match=r"guided_grammar: takes more than 0\.2 s to compile") as refused:
        await bad[0]
    assert refused.value.param == "guided_grammar"
    for task in bad[1:]:
        task.cancel()
    await asyncio.gather(*bad, return_exceptions=True)


async def test_a_verdict_is_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, tried = GrammarGate(tokenizer), list[str]()

    def refuse(_: grammar_gate.GrammarVetter, grammar: str) -> None:
        tried.append(grammar)
        raise GrammarError("no")

    monkeypatch.setattr(grammar_gate.GrammarVetter, "vet", refuse)
    checks = (gate.check(client, OutputForm("g", "guided_grammar")) for client in "ab" for _ in range(20))
    told = await asyncio.gather(*checks, return_exceptions=True)
    assert all(isinstance(one, InvalidRequest) for one in told)
    assert 1 <= len(tried) <= 2  # the two clients' first may be tried beside each other


async def test_owners_learn_nothing_of_each_others_verdicts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, tried = GrammarGate(tokenizer), list[str]()
    monkeypatch.setattr(grammar_gate.GrammarVetter, "vet", lambda _, grammar: tried.append(grammar))
    for owner in ("one", "one", "other", ""):
        await gate.check(owner, OutputForm("g", "guided_grammar"), owner)
    assert len(tried) == 3


async def test_what_no_text_follows_is_refused(tokenizer: Tokenizer) -> None:
    """Before: the answer failed at its first token."""
    app = app_of(ScriptedGenerate(saying(tokenizer, "x")), tokenizer)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": schema}
    async with calling(app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert answer.json()["error"]["message"] == "response_format: no text follows it"


async def test_costly_grammars_that_pass_are_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers forget them as well: whoever sends many pays for each, and a client with one pays once."""
    monkeypatch.setattr(grammar_gate, "COSTLY", 0.0)
    gate, tried = GrammarGate(tokenizer), list[str]()
    monkeypatch.setattr(grammar_gate.GrammarVetter, "vet", lambda _, grammar: tried.append(grammar))
    forms = [OutputForm(choice_grammar([str(number)]), "x") for number in range(grammar_gate.KNOWN_COSTLY + 1)]
    for form in (forms[0], forms[0], *forms, *forms[2:], forms[0]):
        await gate.check("a", form)
    assert [tried.count(form.grammar) for form in forms] == [2] + [1] * grammar_gate.KNOWN_COSTLY


async def test_who_waits_for_a_verdict_when_the_gate_closes_is_told(tokenizer: Tokenizer) -> None:
    """Before: a 500, when everything else had gone."""
    gate = GrammarGate(tokenizer, 600.0)
    forms = [OutputForm(written_grammar(LONGER) + f"\nB{i}: /b/", "guided_grammar") for i in range(3)]
    waiting = [asyncio.create_task(gate.check("a", form)) for form in forms]
    while gate._vetters[-1]._connection is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    gate.close()
    for told in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60):
        assert isinstance(told, Unavailable) and told.code == "draining"
