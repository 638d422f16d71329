"""What a front tells the workers it adds, and what those that have flipped are started as when they die."""

from __future__ import annotations

import asyncio

import pytest

from deploy.control.below import ChildProcesses
from deploy.runtime.supervisor import ChildSpec, Supervisor
from serving.errors import InvalidRequest, Unavailable
from serving.messages import Role


class UnstartedSupervisor(Supervisor):
    """Its children never run, and leave when `gone` is set."""

    gone: asyncio.Event

    def _begin(self, child: ChildSpec) -> None: ...

    async def let_go(self, name: str, seconds: float) -> None:
        del self.children[name]
        await self.gone.wait()


def worker(role: str, name: str, *flags: str) -> ChildSpec:
    return ChildSpec(name=name, arguments=(role, "model", *flags, "--worker-name", name, "--parent", "1"))


@pytest.fixture
def below() -> ChildProcesses:
    specs = [
        worker("prefill", "prefill-0", "--max-num-seqs=3"),
        worker("decode", "decode-0", "--max-num-seqs=9"),
        ChildSpec(name="kvcache-0", arguments=("kvcache", "--worker-name", "kvcache-0")),
    ]
    return ChildProcesses(UnstartedSupervisor(specs, {}), 10.0)


async def test_one_more_is_told_what_another_of_its_role_is_told(below: ChildProcesses) -> None:
    below.add(Role.DECODE)
    below.add(Role.MIXED)
    children = below.supervisor.children
    assert children["decode-1"] == worker("decode", "decode-1", "--max-num-seqs=9")
    assert children["mixed-0"] == worker("mixed", "mixed-0", "--max-num-seqs=3"), "none is mixed yet"
    assert list(below.roles()) == ["prefill-0", "decode-0", "decode-1", "mixed-0"], "a pool node is no worker"


async def test_one_that_has_flipped_is_started_in_its_new_role(below: ChildProcesses) -> None:
    below.flipped("decode-0", Role.PREFILL)
    below.flipped("elsewhere-0", Role.PREFILL)
    assert below.supervisor.children["decode-0"] == worker("prefill", "decode-0", "--max-num-seqs=9")
    assert below.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.PREFILL}


async def test_the_name_of_one_that_still_leaves_is_not_given_away(below: ChildProcesses) -> None:
    assert isinstance(below.supervisor, UnstartedSupervisor)
    below.supervisor.gone = asyncio.Event()
    below.add(Role.DECODE)
    below.let_go("decode-1")
    await asyncio.sleep(0)
    assert below.leaving() == ["decode-1"] and "decode-1" not in below.roles()
    below.add(Role.DECODE)
    assert "decode-2" in below.roles()
    with pytest.raises(InvalidRequest, match="decode-1 was not started here"):
        below.let_go("decode-1")
    below.supervisor.gone.set()
    while below.leaving():
        await asyncio.sleep(0)


async def test_pool_nodes_and_workers_of_others_are_not_let_go(below: ChildProcesses) -> None:
    for name in ("kvcache-0", "elsewhere-0"):
        with pytest.raises(InvalidRequest, match=f"{name} was not started here"):
            below.let_go(name)


async def test_a_front_without_workers_of_its_own_starts_none() -> None:
    with pytest.raises(Unavailable, match="none to start another like"):
        ChildProcesses(UnstartedSupervisor([], {}), 10.0).add(Role.DECODE)
