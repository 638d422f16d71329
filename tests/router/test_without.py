"""Who may go: the last of a role stays, whoever asks when, and a role that nobody serves may be taken."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from router.candidate import Candidate
from router.fleet import Fleet, RouterConfig
from router.service import RegistryService
from router.without import lacking_without
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from tests.router.scripted import make_status


class Asked:
    """A router that its workers ask, and the clock of both."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self.now = 100.0
        self.fleet = Fleet(RouterConfig(), lambda status: NotImplemented, clock=lambda: self.now)
        self.service = RegistryService(self.fleet)
        for name, role in roles.items():
            self.beat(name, role)

    def beat(self, name: str, role: Role, life: int = 0, draining: bool = False) -> None:
        self.fleet.heartbeat(make_status(name, role, instance=f"{name}-{life}", draining=draining))

    async def without(self, name: str) -> str:
        return (await self.service.Without(pb.WithoutRequest(worker=name), None)).role


TWO_OF_EACH = {"p-0": Role.PREFILL, "p-1": Role.PREFILL, "d-0": Role.DECODE, "d-1": Role.DECODE}


async def test_of_two_that_ask_at_once_one_stays() -> None:
    """Neither has said yet that it drains."""
    asked = Asked(TWO_OF_EACH)
    assert [await asked.without(name) for name in ("d-0", "d-1", "d-0")] == ["", "decode", ""]


async def test_one_that_was_let_go_counts_again_once_it_serves_or_has_not_gone() -> None:
    asked = Asked(TWO_OF_EACH)
    assert await asked.without("d-0") == ""
    asked.beat("d-0", Role.PREFILL, life=1)
    assert await asked.without("p-0") == "", "it serves in its new role"
    asked.beat("p-0", Role.PREFILL, draining=True)
    assert await asked.without("p-1") == ""
    asked.now += RouterConfig().silence
    for name, role in {"p-0": Role.PREFILL, "p-1": Role.PREFILL, "d-1": Role.DECODE}.items():
        asked.beat(name, role)
    asked.beat("d-0", Role.DECODE, life=2)
    assert await asked.without("d-1") == "", "nobody has gone after all"


async def test_what_a_router_does_not_know_it_does_not_keep() -> None:
    assert await Asked({}).without("w") == ""


async def test_where_nobody_decodes_a_prefill_worker_may_begin_to() -> None:
    """The last decode worker has died: to keep its role from the others would keep the fleet from serving."""
    asked = Asked({"p-0": Role.PREFILL, "p-1": Role.PREFILL})
    assert await asked.without("p-0") == ""
    assert await asked.without("p-1") == "prefill"


@given(st.lists(st.tuples(st.sampled_from(Role), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=6))
def test_only_a_role_that_it_has_is_lacking(told: list[tuple[Role, str, bool]]) -> None:
    workers = [
        Candidate(make_status(f"w-{number}", role, pairing=pairing, draining=draining))
        for number, (role, pairing, draining) in enumerate(told)
    ]
    own, *others = workers
    role = lacking_without(workers, own)
    there = [each for each in others if each.generation == own.generation and not each.status.draining]
    lost = {
        Role.PREFILL: own.prefills and not any(each.prefills for each in there),
        Role.DECODE: own.decodes and not any(each.decodes for each in there),
    }
    assert lost[role] if role is not None else not any(lost.values())
