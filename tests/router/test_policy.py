"""Policies: whom they rank and in what order, and what each keeps to: a new one joins by its name in POLICIES."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidate import Candidate, Dispatched
from router.policies import POLICIES, make_policy
from router.policy import (
    Decision,
    Demand,
    LeastLoaded,
    Policy,
    PrefixAware,
    RankingPolicy,
    RoundRobin,
    SessionSticky,
    able_to_decode,
    able_to_prefill,
    view_for_prefill,
)
from serving.class_metrics import REASONS
from serving.config import PlacementConfig
from serving.messages import Build, Role
from tests.router.scripted import lease_view, make_status

ROLE = st.sampled_from(list(Role))
WORKERS = st.lists(
    st.builds(
        lambda n, role, running, free, draining, model, paired, leases, tokens, waiting: Candidate(
            make_status(
                n,
                role,
                running=running,
                free_blocks=free,
                draining=draining,
                fingerprint=model,
                pairing=paired,
                waiting_tokens=waiting,
            ),
            Dispatched(prompt_tokens=tokens),
            leases,
        ),
        st.sampled_from("abcdefgh"),
        ROLE,
        st.integers(0, 8),
        st.integers(0, 100),
        st.booleans(),
        st.sampled_from(["model", "another"]),
        st.sampled_from(["model", "another"]),
        st.integers(0, 8),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.status.name,
)


BUILDS = st.sampled_from([None, Build("model", "model")])
INSTANCES = [f"{n}-life" for n in "abcdefgh"]


def demanded(tokens: int, build: Build | None, cached: dict[str, int]) -> Demand:
    return Demand(tokens=tokens, build=build, cached={worker: min(held, tokens) for worker, held in cached.items()})


DEMANDS = st.builds(
    demanded, st.integers(1, 400), BUILDS, st.dictionaries(st.sampled_from(INSTANCES), st.integers(0, 400))
)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


# ---- what every policy keeps to ------------------------------------------------------------------------------------


RANKING = [name for name, policy in POLICIES.items() if issubclass(policy, RankingPolicy)]


def ranking(name: str) -> RankingPolicy:
    policy = make_policy(name)
    assert isinstance(policy, RankingPolicy)
    return policy


def lease(policy: Policy, demand: Demand, workers: list[Candidate]) -> Decision | None:
    return policy.choose(demand, lease_view(demand, workers), now=0.0)


def prefill(
    policy: Policy, demand: Demand, workers: list[Candidate], own: str, avoid: set[str] | None = None, *, begun: bool
) -> Candidate | None:
    holder = next((worker for worker in workers if worker.status.instance == own), None)
    view = view_for_prefill(demand, workers, lease_view(demand, workers).links, holder, avoid or set(), begun=begun)
    decision = policy.choose(demand, view, now=0.0)
    return decision.prefill if decision is not None else None


@settings(max_examples=200, deadline=None)
@given(workers=WORKERS, demand=DEMANDS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_names_workers_that_may_take_the_request(
    name: str, workers: list[Candidate], demand: Demand
) -> None:
    policy, view = make_policy(name), lease_view(demand, workers)
    decision = policy.choose(demand, view, now=0.0)
    if decision is None:
        assert not view.decode and not view.prefill
        return
    assert (decision.decode in view.decode) if view.decode else decision.decode is None
    able = view.prefills_for(decision.decode, 0.0) if decision.decode is not None else view.prefill
    assert (decision.prefill in able) if able else decision.prefill is None
    assert decision.reason in REASONS


@settings(max_examples=100, deadline=None)
@given(workers=WORKERS, demand=DEMANDS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "round_robin"])
def test_the_order_of_the_workers_given_decides_nothing(name: str, workers: list[Candidate], demand: Demand) -> None:
    policy = make_policy(name)
    one, other = lease(policy, demand, workers), lease(policy, demand, list(reversed(workers)))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.decode, one.prefill) == (other.decode, other.prefill)


@settings(max_examples=100, deadline=None)
@given(workers=WORKERS, demand=DEMANDS, decodes=st.booleans())
@pytest.mark.parametrize("name", RANKING)
def test_every_worker_given_is_ranked_once(name: str, workers: list[Candidate], demand: Demand, decodes: bool) -> None:
    policy = ranking(name)
    rank = policy.decode_order if decodes else policy.prefill_order
    assert sorted(rank(demand, workers), key=id) == sorted(workers, key=id)


@settings(max_examples=100, deadline=None)
@given(workers=WORKERS, demand=DEMANDS)
@pytest.mark.parametrize("name", RANKING)
def test_the_best_worker_is_the_first_of_the_order(name: str, workers: list[Candidate], demand: Demand) -> None:
    order = ranking(name).decode_order(demand, workers)
    assert ranking(name).best_decode(demand, workers) is (order[0] if order else None)


SIZES = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 20)), min_size=1, max_size=6)  # context, device blocks


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, tokens=st.integers(1, 400))
@pytest.mark.parametrize("name", POLICIES)
def test_a_long_request_goes_where_it_fits_and_first_where_the_device_holds_it(
    name: str, sizes: list[tuple[int, int]], tokens: int
) -> None:
    workers = [
        Candidate(make_status(f"w{n}", max_model_len=limit, block_size=16, total_blocks=blocks, free_blocks=blocks))
        for n, (limit, blocks) in enumerate(sizes)
    ]
    decision = lease(make_policy(name), Demand(tokens=tokens), workers)
    assert decision is not None and decision.decode is not None
    able = [worker for worker in workers if tokens < worker.status.max_model_len] or workers
    on_device = [worker for worker in able if tokens < worker.status.total_blocks * 16]
    assert decision.decode in (on_device or able)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "session_sticky"])
def test_equal_workers_share_the_requests(name: str) -> None:
    """A tie that always falls on the same worker makes a herd of several routers, and of one between heartbeats."""
    policy, workers = make_policy(name), [Candidate(make_status(name)) for name in "abcd"]
    chosen = Counter[str]()
    for n in range(400):
        decision = lease(policy, Demand(tokens=50, salt=crc32(b"request-%d" % n)), workers)
        assert decision is not None and decision.decode is not None
        chosen[decision.decode.status.name] += 1
    assert len(chosen) == 4 and min(chosen.values()) >= 60


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "round_robin"])
def test_a_busier_worker_comes_later(name: str) -> None:
    busy = Candidate(make_status("a", running=6, free_blocks=40, waiting_tokens=500))
    idle = Candidate(make_status("b"))
    decision = lease(make_policy(name), Demand(tokens=100), [busy, idle])
    assert decision is not None and decision.decode is decision.prefill is idle


def test_every_policy_can_be_asked_for() -> None:
    (field,) = (field for field in fields(PlacementConfig) if field.name == "routing_policy")
    assert set(field.metadata["choices"]) == set(POLICIES) and field.default in POLICIES


# ---- who may take a request at all ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(WORKERS, BUILDS)
def test_decode_is_for_workers_of_the_build_that_stay(workers: list[Candidate], build: Build | None) -> None:
    able = [
        worker
        for worker in workers
        if worker.status.role is not Role.PREFILL
        and not worker.status.draining
        and (build is None or worker.status.fingerprint == "model")
    ]
    assert able_to_decode(Demand(tokens=1, build=build), workers) == able


@settings(max_examples=200, deadline=None)
@given(WORKERS, BUILDS, st.sets(st.sampled_from(INSTANCES[:4])))
def test_prefill_is_for_workers_that_pair_and_have_not_failed(
    workers: list[Candidate], build: Build | None, avoid: set[str]
) -> None:
    able = [
        worker
        for worker in workers
        if worker.status.role is not Role.DECODE
        and not worker.status.draining
        and (build is None or worker.status.pairing == "model")
        and worker.status.instance not in avoid
    ]
    assert able_to_prefill(Demand(tokens=1, build=build), workers, avoid) == able


def test_a_mixed_worker_prefills_for_its_own_leases_even_while_it_drains(policy: Policy) -> None:
    own = Candidate(make_status("own", draining=True, waiting_tokens=900))
    other = Candidate(make_status("other"))
    demand = Demand(tokens=10)
    assert prefill(policy, demand, [other, own], "own-life", begun=False) is own
    assert prefill(policy, demand, [other, own], "own-life", {"own-life"}, begun=False) is other
    assert prefill(policy, demand, [own], "elsewhere", begun=False) is None


def test_a_decode_worker_computes_only_texts_that_have_outgrown_all_others(policy: Policy) -> None:
    decode = Candidate(make_status("d", Role.DECODE))
    small = Candidate(make_status("p", Role.PREFILL, max_model_len=50))
    workers = [small, decode]
    assert prefill(policy, Demand(tokens=60), workers, "d-life", begun=True) is decode
    assert prefill(policy, Demand(tokens=60), workers, "d-life", begun=False) is small, "it says why not"
    assert prefill(policy, Demand(tokens=40), workers, "d-life", begun=True) is small


# ---- least loaded --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(WORKERS)
def test_least_loaded_decodes_by_load_and_prefills_by_queue(workers: list[Candidate]) -> None:
    policy, demand = LeastLoaded(), Demand(tokens=1)
    order = policy.decode_order(demand, workers)
    loads = [max(max(w.leases, w.status.running) / 8, 1 - w.status.free_blocks / 100) for w in order]
    assert loads == sorted(loads)
    queues = [w.newer.prompt_tokens + w.status.waiting_tokens for w in policy.prefill_order(demand, workers)]
    assert queues == sorted(queues)


# ---- round robin and sticky sessions -------------------------------------------------------------------------------


def test_round_robin_takes_every_worker_in_turn_but_full_ones_last() -> None:
    policy, workers = RoundRobin(), [Candidate(make_status(name)) for name in "cab"]
    order = [policy.decode_order(Demand(tokens=1), workers)[0].status.name for _ in range(6)]
    assert order == ["a", "b", "c", "a", "b", "c"]
    workers[1] = Candidate(make_status("a", running=8))
    assert [policy.decode_order(Demand(tokens=1), workers)[0].status.name for _ in range(3)] == ["b", "b", "c"]


def test_round_robin_turns_prefill_and_decode_workers_apart() -> None:
    workers = [Candidate(make_status(f"{role}{n}", role)) for role in (Role.PREFILL, Role.DECODE) for n in range(2)]
    policy, seen = RoundRobin(), set()
    for _ in range(4):
        decision = lease(policy, Demand(tokens=1), workers)
        assert decision is not None and decision.decode is not None and decision.prefill is not None
        seen |= {decision.decode.status.name, decision.prefill.status.name}
    assert len(seen) == 4


def test_a_session_stays_while_there_is_room_and_others_do_not_move_when_a_worker_leaves() -> None:
    policy, workers = SessionSticky(), [Candidate(make_status(name)) for name in "abcd"]

    def home(session: str, able: list[Candidate]) -> str:
        return policy.decode_order(Demand(tokens=1, session=session), able)[0].status.name

    homes = {f"s{n}": home(f"s{n}", workers) for n in range(200)}
    assert set(homes.values()) == set("abcd")
    without = [worker for worker in workers if worker.status.name != "a"]
    assert all(home(session, without) == was for session, was in homes.items() if was != "a")
    full = [replace(worker, status=replace(worker.status, running=8)) for worker in workers[:1]] + workers[1:]
    assert all(home(session, full) != "a" for session in homes)


# ---- prefix-aware --------------------------------------------------------------------------------------------------


def test_a_cached_prefix_outweighs_a_shorter_queue_by_its_tokens() -> None:
    holder = Candidate(make_status("h", waiting_tokens=90))
    idle = Candidate(make_status("i"))
    policy = PrefixAware()
    for rank in (policy.decode_order, policy.prefill_order):
        assert rank(Demand(tokens=200, cached={"h-life": 96}), [holder, idle])[0] is holder
        assert rank(Demand(tokens=200, cached={"h-life": 80}), [holder, idle])[0] is idle


def test_kv_in_use_spreads_a_popular_prefix() -> None:
    holder = Candidate(make_status("h", free_blocks=20))  # 80 blocks of 16 tokens in use: as 160 prompt tokens
    idle = Candidate(make_status("i"))
    order = PrefixAware().decode_order(Demand(tokens=300, cached={"h-life": 159}), [holder, idle])
    assert order == [idle, holder]
    order = PrefixAware().decode_order(Demand(tokens=300, cached={"h-life": 161}), [holder, idle])
    assert order == [holder, idle]


def test_a_full_worker_comes_last_whatever_it_has_cached() -> None:
    holder, idle = Candidate(make_status("h", running=8)), Candidate(make_status("i", waiting_tokens=900))
    assert PrefixAware().decode_order(Demand(tokens=300, cached={"h-life": 299}), [holder, idle]) == [idle, holder]
    freer = replace(holder, status=make_status("h", running=7))
    assert PrefixAware().decode_order(Demand(tokens=300, cached={"h-life": 299}), [freer, idle]) == [freer, idle]
