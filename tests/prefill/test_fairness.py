"""Tenants share a worker's prompts: whoever has been served less goes first, where not all can be in time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.fairness import EQUAL
from prefill.ordering import FirstComeFirstServed, PromptOrder, SlackOrder
from prefill.scheduler import PrefillScheduler
from serving.engine.ageing import AGE, STEP
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.step_cost import StepCost
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv

COST = StepCost(fixed=0.01, token=0.001, samples=100)
STEP_TOKENS = 512


def prompt(client: str, tokens: int, at: float = 0.0, **fields: Any) -> SequenceState:
    return make_sequence(None, [1] * tokens, now=at, client=client, **fields)


class Queue:
    """Prompts that are computed a step of tokens after the other, in the order that is tested."""

    def __init__(self, order: PromptOrder | None = None, cost: StepCost | None = COST):
        self.order = order or SlackOrder(lambda: cost)
        self.prompts: list[SequenceState] = []
        self.done: dict[SequenceState, float] = {}
        self.computed: Counter[str] = Counter()
        self.now = 0.0

    def add(self, seq: SequenceState) -> SequenceState:
        self.order.arrived(seq, self.prompts)
        self.prompts.append(seq)
        return seq

    def step(self, tokens: int = STEP_TOKENS) -> None:
        self.order.sort(self.prompts, tokens, (), self.now)
        left = tokens
        for seq in list(self.prompts):
            count = min(left, seq.uncomputed)
            if count:
                self.order.computing(seq, count)
                seq.computed += count
                self.computed[seq.request.client] += count
                left -= count
        self.now += COST.fixed + COST.token * (tokens - left)
        for seq in [seq for seq in self.prompts if not seq.uncomputed]:
            self.prompts.remove(seq)
            self.done[seq] = self.now


def test_one_tenants_prompts_do_not_keep_another_waiting() -> None:
    queue = Queue()
    for _ in range(8):
        queue.add(prompt("greedy", 1500))
    queue.step()
    chat = queue.add(prompt("chat", 64, at=queue.now))
    queue.step()
    assert chat in queue.done, "it waits behind prompts of a tenant that is served more"


def test_first_come_first_served_asks_for_no_tenant() -> None:
    queue = Queue(FirstComeFirstServed())
    greedy = queue.add(prompt("greedy", 1500))
    chat = queue.add(prompt("chat", 64))
    queue.step(1500)
    assert greedy in queue.done and chat not in queue.done


def test_a_cache_salt_tells_tenants_apart_where_there_are_no_keys() -> None:
    queue = Queue()
    queue.add(prompt("", 2000, tenant="one"))
    other = queue.add(prompt("", 64, tenant="other"))
    queue.step()
    assert other in queue.done


def test_the_order_of_slack_stays_while_all_can_be_in_time() -> None:
    queue = Queue()
    urgent = [queue.add(prompt("greedy", 1000, first_token_in=9.0)) for _ in range(3)]
    patient = queue.add(prompt("chat", 64, first_token_in=60.0))
    while patient not in queue.done:
        queue.step()
    assert all(seq in queue.done for seq in urgent)


def test_of_a_level_that_cannot_be_in_time_tenants_share() -> None:
    queue = Queue()
    for _ in range(8):
        queue.add(prompt("greedy", 1500, first_token_in=4.0))
    chat = queue.add(prompt("chat", 64, first_token_in=9.9))
    queue.step()
    assert chat in queue.done


def test_a_late_prompt_of_a_tenant_is_not_left_behind_those_in_time_of_another() -> None:
    """The other has always some that can be in time: eight connections ask again as soon as they are answered."""
    queue = Queue()
    late = queue.add(prompt("chat", 600, first_token_in=0.1))
    for _ in range(8):
        queue.add(prompt("greedy", 1500, first_token_in=5.0))
    while late not in queue.done:
        queue.step()
        while len(queue.prompts) < 8:
            queue.add(prompt("greedy", 1500, at=queue.now, first_token_in=5.0))
        assert queue.now < 4.0


def test_importance_goes_before_fairness() -> None:
    queue = Queue()
    important = [queue.add(prompt("greedy", 1500, priority=-STEP)) for _ in range(3)]
    chat = queue.add(prompt("chat", 64))
    while not all(seq in queue.done for seq in important):
        assert chat not in queue.done
        queue.step(500)


def test_lateness_of_one_level_reorders_no_other() -> None:
    """Prompts of a batch that wait for long say nothing of whether interactive ones are in time."""
    queue = Queue()
    queue.now = AGE - 1.0
    batch = queue.add(prompt("someone", 100, priority=STEP))
    first = queue.add(prompt("greedy", 1400, at=queue.now, first_token_in=5.0))
    second = queue.add(prompt("chat", 64, at=queue.now, first_token_in=50.0))
    queue.order.sort(queue.prompts, STEP_TOKENS, (), queue.now)
    assert queue.prompts == [first, second, batch]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), stated=st.booleans())
def test_backlogged_tenants_are_computed_as_many_tokens(seed: int, stated: bool) -> None:
    """While both have prompts, what they are computed differs by the other's next prompt and EQUAL tokens at most.

    Prompts that come in time and are late then change places within their tenant: several of it are begun, and a number
    of prompts says little of how much of them is left.
    """
    choice = random.Random(seed)
    queue, longest = Queue(cost=choice.choice((COST, None))), choice.randrange(1, 3000)
    fields: dict[str, Any] = {"first_token_in": 0.001} if stated else {}
    names = [str(number) for number in range(choice.randrange(2, 5))]
    connections = {name: choice.randrange(4, 9) for name in names}
    for _ in range(60):
        for name in names:
            left = [seq.uncomputed for seq in queue.prompts if seq.request.client == name]
            while len(left) < connections[name] or sum(left) <= longest:  # else a step might compute all of them
                left.append(choice.randrange((longest + 1) // 2, longest + 1))
                queue.add(prompt(name, left[-1], at=queue.now, **fields))
        queue.step(choice.randrange(1, longest + 1))
        if queue.now > AGE:
            break  # then waiting counts for more
        least, most = (pick(queue.computed[name] for name in names) for pick in (min, max))
        assert most - least <= longest + EQUAL


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), stated=st.booleans())
def test_a_prompt_waits_for_little_of_each_other_tenant(seed: int, stated: bool) -> None:
    """At most for as much as itself and EQUAL tokens of each, and for the step that runs when it comes."""
    choice = random.Random(seed)
    queue = Queue()
    fields: dict[str, Any] = {"first_token_in": choice.uniform(0.0, 0.1)} if stated else {}
    others = [str(number) for number in range(choice.randrange(1, 4))]
    for _ in range(choice.randrange(0, 9)):
        for name in others:
            queue.add(prompt(name, choice.randrange(1, 3000), **fields))
        queue.step()
    for name in others:
        for _ in range(8):
            queue.add(prompt(name, choice.randrange(1, 3000), at=queue.now, **fields))
    mine = queue.add(prompt("mine", choice.randrange(1, 600), at=queue.now, **fields))
    before = queue.computed.total()
    while mine not in queue.done:
        queue.step()
        if queue.now > AGE:
            return
        if len(queue.prompts) < 30:
            queue.add(prompt(choice.choice(others), choice.randrange(1, 3000), at=queue.now, **fields))
    tokens = mine.request.longest - mine.request.sampling.max_tokens
    assert queue.computed.total() - before <= tokens + len(others) * (tokens + EQUAL) + STEP_TOKENS


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_prompts_of_one_tenant_keep_their_order(seed: int) -> None:
    """Beside another tenant they are computed in the order that they have alone."""
    choice = random.Random(seed)
    goals = [{"first_token_in": choice.uniform(0.0, 9.0)} if choice.random() < 0.7 else {} for _ in range(9)]
    own = [prompt("own", choice.randrange(1, 2000), **fields) for fields in goals]
    alone, order = list(own), SlackOrder(lambda: None)
    SlackOrder(lambda: None).sort(alone, STEP_TOKENS, (), 1.0)
    both = [*own, *(prompt("other", choice.randrange(1, 2000), first_token_in=0.0) for _ in range(5))]
    choice.shuffle(both)
    both.sort(key=lambda seq: own.index(seq) if seq in own else -1)
    order.sort(both, STEP_TOKENS, (), 1.0)
    if all(not goal for goal in goals):
        return  # first come, first served alone
    assert [seq for seq in both if seq in own] == alone


def test_a_scheduler_counts_what_it_computes() -> None:
    kv = make_kv(64, 4)
    scheduler = PrefillScheduler(kv, order=SlackOrder(lambda: None))
    first = make_sequence(kv, [1, 2, 3, 4] * 20, client="greedy")
    chat = make_sequence(kv, [5] * 4, client="chat")
    for seq in (first, chat):
        scheduler.add(seq)
    plan = StepPlan(8, 4)
    scheduler.fill(plan, 0.0)
    fair = scheduler.order.fair  # type: ignore[attr-defined]
    assert {work.seq: work.count for work in plan.work} == {first: 8}, "within EQUAL tokens it is the order they came"
    assert fair.shares.served("greedy") == 8 and fair.shares.served("chat") == 0
