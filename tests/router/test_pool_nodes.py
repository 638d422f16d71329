"""The registry of pool nodes: who is there, who workers are told of, who is gone; and the door they report at."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.fleet import Fleet, RouterConfig
from router.pool_nodes import PoolNodes
from router.service import RegistryService
from serving.messages import PoolReport, PoolStat
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.proto import pool_pb2 as pool
from serving.rpc import Caller, listen, server
from serving.wire import to_pb
from tests.router.scripted import ScriptedWorker, make_status

SILENCE = 5.0
NODES = st.sampled_from(["a:1", "b:1", "c:1"])


def report(address: str, *, life: int = 0, draining: bool = False, **counts: Any) -> PoolReport:
    zeros = dict.fromkeys(("lookups", "found", "stored", "refused", "pinned", "backlog"), 0)
    stat = PoolStat(
        name=f"node {address}", instance=f"{address}/{life}", tiers={}, namespaces={}, **{**zeros, **counts}
    )
    return PoolReport(stat=stat, address=address, draining=draining)


class PoolsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pools = PoolNodes(SILENCE)
        self.now = 0.0
        self.known: dict[str, tuple[float, int, bool]] = {}

    @rule(address=NODES, life=st.integers(0, 1), draining=st.booleans())
    def report(self, address: str, life: int, draining: bool) -> None:
        news = self.known.get(address, (0.0, -1, False))[1:] != (life, draining)
        assert self.pools.heartbeat(report(address, life=life, draining=draining), self.now) == news
        self.known[address] = (self.now, life, draining)

    @rule(seconds=st.sampled_from([0.5, 4.9, 5.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = {address for address, (seen, _, _) in self.known.items() if self.now - seen > SILENCE}
        assert {gone.address for gone in self.pools.expire(self.now)} == silent, "each goes once"
        for address in silent:
            del self.known[address]

    @invariant()
    def agrees_with_the_model(self) -> None:
        usable = sorted(address for address, (_, _, draining) in self.known.items() if not draining)
        assert self.pools.nodes() == [f"node {address}@{address}" for address in usable]
        reports = [(one.address, one.stat.instance, one.draining) for one in self.pools.reports()]
        assert reports == [(a, f"{a}/{life}", leaving) for a, (_, life, leaving) in sorted(self.known.items())]


TestPools = PoolsMachine.TestCase


def named(name: str, address: str) -> PoolReport:
    whole = report(address)
    return replace(whole, stat=replace(whole.stat, name=name))


def test_a_node_that_comes_back_elsewhere_takes_its_own_place() -> None:
    pools = PoolNodes(SILENCE)
    pools.heartbeat(named("a", "h:1"), 0.0)
    pools.heartbeat(named("b", "h:2"), 0.0)
    assert pools.heartbeat(named("a", "h:9"), 1.0)
    assert pools.nodes() == ["a@h:9", "b@h:2"]


def test_two_living_nodes_of_one_name_do_not_push_each_other_out() -> None:
    pools = PoolNodes(SILENCE)
    for now in range(4):
        for address in ("h:1", "h:2"):
            pools.heartbeat(named("a", address), float(now))
    assert pools.nodes() == ["a@h:1", "a@h:2"]
    assert not pools.heartbeat(named("a", "h:1"), 5.0)


def test_two_living_nodes_of_one_name_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(RouterConfig(), lambda status: ScriptedWorker(status, {}), lambda: 0.0)
    for address in ("h:1", "h:2"):
        fleet.pool_heartbeat(named("a", address))
    assert [one for one in caplog.records if one.levelno == logging.WARNING] == [], "it may have come back elsewhere"
    for _ in range(3):
        for address in ("h:1", "h:2", "h:3"):
            fleet.pool_heartbeat(named("a" if address != "h:3" else "b", address))
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "h:1 and h:2 are both named a" in warning and "--worker-name" in warning
    assert fleet.pool_nodes.namesakes(replace(named("a", "h:1"), draining=True)) == []


async def test_nodes_report_and_every_answer_tells_where_the_pool_is() -> None:
    now = [100.0]
    fleet = Fleet(RouterConfig(silence=SILENCE), lambda status: ScriptedWorker(status, {}), lambda: now[0])
    door = server("key")
    stubs.add_RegistryServicer_to_server(RegistryService(fleet), door)
    caller = Caller(f"127.0.0.1:{listen(door, '127.0.0.1', 0)}", "key")
    await door.start()
    stub = stubs.RegistryStub(caller.channel)

    async def node(told: PoolReport) -> list[str]:
        reply = await stub.PoolHeartbeat(to_pb(told, pool.PoolStat), metadata=caller.metadata, timeout=10)
        assert reply.router == "router"
        return list(reply.pool_nodes)

    async def worker() -> list[str]:
        request = pb.HeartbeatRequest(status=to_pb(make_status(), pb.WorkerStatus))
        reply = await stub.Heartbeat(request, metadata=caller.metadata, timeout=10)
        return list(reply.pool_nodes)

    assert await worker() == []
    assert await node(report("b:1", stored=7)) == ["node b:1@b:1"]
    assert await node(report("a:1")) == await worker() == ["node a:1@a:1", "node b:1@b:1"]
    assert [one.stat.stored for one in fleet.pool_nodes.reports()] == [0, 7]
    assert await node(report("a:1", draining=True)) == ["node b:1@b:1"], "a node that leaves is not handed to workers"
    for _ in range(int(SILENCE) + 1):
        now[0] += 1
        fleet.expire()
    assert await worker() == []
    await caller.close()
    await door.stop(0)
    await fleet.close()
