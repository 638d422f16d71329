"""A worker changes its role while it lives: streams end with their whole texts, and what fails changes nothing."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.autoscaler.actuator import ActuatorError
from deploy.autoscaler.by_router import RouterActuator
from deploy.control.service import flip_over
from deploy.runtime.settings import read_settings
from deploy.worker.flipping import LAST, UNDRAINED, FlippableWorker
from deploy.worker.life import WorkerMaker
from deploy.worker.proposers import DraftParts
from deploy.worker.status_door import WorkerDoor
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.errors import Draining, InvalidRequest, Unauthorized, Unavailable
from serving.grpc_tls import grpc_tls
from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from serving.rpc import Caller
from tests.certificates import Authority
from tests.fakes.sequences import make_request
from tests.flow.conftest import Cluster
from tests.flow.flipping import DRAIN_SECONDS, FlippingCluster
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.remote import KEY

TOKENS = 40


class Flow:
    """Streams at a cluster of one prefill and two decode workers, whose texts are compared at the end."""

    def __init__(self, cluster: Cluster, made: FlippingCluster, path: Path):
        self.cluster = cluster
        self.made = made
        self.path = path
        self.asked: list[tuple[list[int], asyncio.Task[list[int]]]] = []

    def begin(self, count: int, seed: int, tokens: int = TOKENS) -> None:
        for prompt in prompts(count, shortest=20, longest=120, seed=seed):
            asked = make_request(prompt, request_id=f"{seed}-{len(self.asked)}", max_tokens=tokens, ignore_eos=True)
            self.asked.append((prompt, asyncio.create_task(self.cluster.tokens(asked))))

    async def decoding(self, name: str) -> None:
        """A stream decodes on the worker."""
        async with asyncio.timeout(60):
            while not self.made.named(name).status().running:
                if all(task.done() for _, task in self.asked):  # they were quicker than this looks
                    self.begin(8, len(self.asked))
                await asyncio.sleep(0.001)

    async def whole(self) -> None:
        """Every text asked for is there, and is the reference's."""
        for prompt, asked in self.asked:
            tokens = await asked
            assert is_greedy_tiny(self.path, prompt, tokens)
        self.asked.clear()


@pytest.fixture
async def flow(tiny_model: LoadedModel, tiny_path: Path) -> AsyncIterator[Flow]:
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    config, asked = EngineConfig(), RouterConfig(patience=20.0, silence=30.0)
    async with FlippingCluster(tiny_model, ModelConfig(), config, asked, roles=roles) as made:
        flow = Flow(Cluster(made), made, tiny_path)
        yield flow
        await flow.whole()
        assert [error for _, _, error in flow.cluster.seen.endings if error is not None] == []
        assert {type(error) for error in flow.cluster.seen.replacements} <= {Draining}, "no work was torn up"
        await flow.cluster.idle()


async def test_streams_outlast_a_flip_and_the_way_back(flow: Flow) -> None:
    made, flipped = flow.made, flow.made.named("decode-2")
    instances = {flipped.status().instance}
    for role, seed in ((Role.PREFILL, 1), (Role.DECODE, 2), (Role.MIXED, 3)):
        flow.begin(4, seed)
        if flipped.status().role is Role.DECODE:
            await flow.decoding("decode-2")
        flip = asyncio.create_task(made.actuator.flip("decode-2", role))
        flow.begin(4, seed + 10)
        await flip
        status = flipped.status()
        assert (status.role, status.name, status.draining) == (role, "decode-2", False)
        instances.add(status.instance)
        flow.begin(4, seed + 20)
        await flow.whole()
        await flow.cluster.idle()
    assert len(instances) == 4, "each life is another instance"
    assert flipped.flips == flipped.status().counters["role_flips"] == 3
    assert made.below.told == [("decode-2", Role.PREFILL), ("decode-2", Role.DECODE), ("decode-2", Role.MIXED)]
    assert {each.status().name for each in made.flippable} == {each.worker_id for each in await made.actuator.workers()}


async def test_a_flipped_worker_does_the_work_of_its_new_role(flow: Flow) -> None:
    await flow.made.actuator.flip("decode-2", Role.PREFILL)
    flow.begin(12, 4)
    await flow.whole()
    worker = flow.made.named("decode-2").worker
    assert worker is not None and worker.decode is None and worker.prefill.bytes_sent > 0


async def test_the_kv_of_a_life_is_given_back_before_the_next_one_takes_its_own(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flippable, door = flow.made.named("decode-2"), WorkerDoor(("tiny",), "millrace")
    make, held, kept = flippable.maker.make, flippable.worker, list[int]()
    assert held is not None
    door.show(held)
    flippable.shown = door.show
    planes = [weakref.ref(plane) for layer in held.context.locations.device.planes for plane in layer]
    del held

    async def makes(role: Role, drafts: DraftParts, *given: object) -> object:
        kept.append(sum(plane() is not None for plane in planes))
        return await make(role, drafts, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(flippable.maker, "make", makes)
    flow.begin(8, 10)
    await flow.decoding("decode-2")
    await flow.made.actuator.flip("decode-2", Role.PREFILL)
    assert planes and kept == [0]
    assert door.health()[0], "the door speaks of the new worker"


async def draining(worker: FlippableWorker) -> None:
    async with asyncio.timeout(60):
        while not worker.status().draining:
            await asyncio.sleep(0)


async def test_a_second_flip_is_refused_by_name_while_one_is_under_way(flow: Flow) -> None:
    flow.begin(8, 5, tokens=80)
    await flow.decoding("decode-2")
    first = asyncio.create_task(flow.made.actuator.flip("decode-2", Role.PREFILL))
    await draining(flow.made.named("decode-2"))
    with pytest.raises(ActuatorError, match="decode-2 flips to prefill: wait until it serves"):
        await flow.made.actuator.flip("decode-1", Role.PREFILL)
    with pytest.raises(Unavailable, match="decode-2 flips to prefill: wait until it serves"):
        await flow.made.named("decode-2").flip(Role.MIXED, None)
    await first


async def test_the_last_worker_of_a_role_keeps_it(flow: Flow) -> None:
    with pytest.raises(ActuatorError, match="prefill-0 stays prefill: without it no worker would prefill"):
        await flow.made.actuator.flip("prefill-0", Role.DECODE)
    await flow.made.actuator.flip("decode-2", Role.PREFILL)
    with pytest.raises(ActuatorError, match="decode-1 stays decode: without it no worker would decode"):
        await flow.made.actuator.flip("decode-1", Role.PREFILL)
    with pytest.raises(ActuatorError, match="no worker 'decode-9' reports here"):
        await flow.made.actuator.flip("decode-9", Role.PREFILL)


async def test_a_worker_that_cannot_begin_in_its_new_role_serves_on_in_the_old_one(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flippable = flow.made.named("decode-2")
    make = flippable.maker.make

    async def fails(role: Role, drafts: DraftParts, *given: object) -> object:
        if role is Role.PREFILL:
            raise ValueError("no memory for its KV")
        return await make(role, drafts, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(flippable.maker, "make", fails)
    with pytest.raises(ActuatorError, match=r"decode-2 stays decode: .* no memory for its KV"):
        await flow.made.actuator.flip("decode-2", Role.PREFILL)
    assert (flippable.status().role, flippable.flips, flow.made.below.told) == (Role.DECODE, 0, [])
    flow.begin(12, 6)
    await flow.decoding("decode-2")


async def test_what_is_seen_to_be_wrong_with_a_role_is_told_before_anything_drains(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flippable = flow.made.named("decode-2")

    def wrong(now: Role, role: Role) -> None:
        raise ValueError("with --tensor-parallel-size 2 a worker keeps its role")

    monkeypatch.setattr(flippable.maker, "check", wrong)
    before = flippable.status().instance
    with pytest.raises(ActuatorError, match="decode-2 stays decode: with --tensor-parallel-size 2"):
        await flow.made.actuator.flip("decode-2", Role.PREFILL)
    assert flippable.status().instance == before and not flippable.status().draining


async def test_a_drain_that_exceeds_its_bound_leaves_the_worker_as_it_was(flow: Flow) -> None:
    """Decodes are moved when their time is up; a prompt that is computed then is not torn up."""
    await flow.made.actuator.flip("decode-2", Role.PREFILL)
    flippable = flow.made.named("decode-2")
    worker = flippable.worker
    assert worker is not None
    gate, run = threading.Event(), worker.engine.runner.run

    def held(*given: object, **named: object) -> object:
        gate.wait(60)
        return run(*given, **named)  # type: ignore[arg-type]

    worker.engine.runner.run = held  # type: ignore[method-assign, assignment]
    try:
        flow.begin(12, 7)
        async with asyncio.timeout(60):
            while not worker.prefill.sequences():
                await asyncio.sleep(0.001)
        with pytest.raises(Unavailable, match=r"stays prefill: prompts were still computed after 0\.05 s") as refused:
            await flippable.flip(Role.DECODE, 0.05)
        assert refused.value.code == UNDRAINED, "no word that this worker keeps its role"
        assert not flippable.status().draining and flippable.worker is worker
    finally:
        gate.set()


async def test_leases_that_outlast_the_drain_move_to_another_worker(flow: Flow) -> None:
    flow.begin(8, 8, tokens=120)
    await flow.decoding("decode-2")
    await flow.made.named("decode-2").flip(Role.PREFILL, 0.0)
    await flow.whole()
    assert {type(error) for error in flow.cluster.seen.replacements} == {Draining}


async def test_strangers_are_refused(flow: Flow) -> None:
    stranger = RouterActuator(flow.made.door_address, "another key", "stranger")
    try:
        for asked in (stranger.flip("decode-2", Role.PREFILL), stranger.drain("decode-2"), stranger.workers()):
            with pytest.raises(ActuatorError, match="set MILLRACE_CLUSTER_KEY"):
                await asked
    finally:
        await stranger.close()
    for key, error in ((None, Unauthorized), ("another key", Unauthorized)):
        caller = Caller(flow.made.named("decode-2").status().address, key)
        try:
            with pytest.raises(error):
                await flip_over(caller, Role.PREFILL, None, DRAIN_SECONDS)
        finally:
            await caller.close()
    assert flow.made.named("decode-2").status().role is Role.DECODE


async def test_with_certificates_the_key_alone_does_not_do(tiny_model: LoadedModel, tmp_path: Path) -> None:
    ours = grpc_tls(Authority().files(tmp_path / "ours").security())
    theirs = grpc_tls(Authority("another").files(tmp_path / "theirs").security())
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    made = FlippingCluster(tiny_model, ModelConfig(), EngineConfig(), RouterConfig(silence=30.0), roles=roles)
    made.tls = ours
    async with made:
        for tls in (None, theirs):
            stranger = RouterActuator(made.door_address, KEY, "stranger", tls)
            with pytest.raises(ActuatorError, match="no answer from the router"):
                await stranger.flip("decode-2", Role.PREFILL)
            await stranger.close()
        await made.actuator.flip("decode-2", Role.PREFILL)
        assert made.named("decode-2").status().role is Role.PREFILL


async def test_one_that_is_told_to_leave_while_it_flips_leaves_as_it_is(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flip does not drain on: who leaves drains by itself, and has its whole time for that."""
    flow.begin(6, 9, tokens=80)
    await flow.decoding("decode-2")
    flippable = flow.made.named("decode-2")
    worker = flippable.worker
    assert worker is not None and worker.decode is not None
    sides = worker.prefill, worker.decode

    async def never_drained(seconds: float) -> None:
        for side in sides:
            side.draining = True
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(worker, "drain", never_drained)
        flip = asyncio.create_task(flow.made.actuator.flip("decode-2", Role.PREFILL))
        await draining(flippable)
        flippable.leaving.set()
        async with asyncio.timeout(60):
            with pytest.raises(ActuatorError, match="decode-2 is leaving"):
                await flip
            await flippable.settle()
    assert flippable.worker is worker and flippable.status().role is Role.DECODE and worker.draining
    await worker.drain(DRAIN_SECONDS)
    assert worker.drained
    await flow.whole()


async def test_one_that_is_told_to_leave_before_it_drains_has_its_whole_time_for_that(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flippable = flow.made.named("decode-2")
    drafts = flippable.maker.drafts

    async def told_meanwhile(role: Role) -> DraftParts:
        flippable.leaving.set()
        return await drafts(role)

    monkeypatch.setattr(flippable.maker, "drafts", told_meanwhile)
    with pytest.raises(ActuatorError, match="decode-2 is leaving"):
        await flow.made.actuator.flip("decode-2", Role.PREFILL)
    assert not flippable.status().draining


async def test_one_whose_engine_dies_as_it_drains_leaves(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody has been told of the end of the engine."""
    flippable = flow.made.named("decode-2")
    worker = flippable.worker
    assert worker is not None
    drain = worker.drain

    async def drains(seconds: float) -> None:
        await drain(seconds)
        worker.loop.fail()

    monkeypatch.setattr(worker, "drain", drains)
    with pytest.raises(ActuatorError, match="decode-2 is leaving"):
        await flow.made.actuator.flip("decode-2", Role.PREFILL)
    await flippable.leaving.wait()
    assert flippable.worker is worker and flippable.status().role is Role.DECODE


async def test_a_flip_that_fails_long_after_it_was_asked_for_is_told_of_once(flow: Flow) -> None:
    flow.begin(6, 10, tokens=80)
    await flow.decoding("decode-2")
    flippable, hasty = flow.made.named("decode-2"), RouterActuator(flow.made.door_address, KEY, "hasty", patience=0.0)
    try:
        await hasty.flip("decode-2", Role.PREFILL)
        await draining(flippable)
        flippable.leaving.set()
        await flippable.settle()
        async with asyncio.timeout(60):
            with pytest.raises(ActuatorError, match="decode-2 is leaving"):
                while True:
                    await hasty.workers()
        assert await hasty.workers()
    finally:
        await hasty.close()


async def test_the_last_of_a_role_stays_whoever_asks_it_to_flip(flow: Flow) -> None:
    """Over its own door, past the control door, it asks its routers who else serves."""
    last = flow.made.named("prefill-0")
    caller = Caller(last.status().address, KEY)
    try:
        with pytest.raises(Unavailable, match="prefill-0 stays prefill: without it no worker would prefill") as refused:
            await flip_over(caller, Role.DECODE, None, DRAIN_SECONDS)
        assert refused.value.code == LAST
        assert last.status().role is Role.PREFILL and not last.status().draining
        await flow.made.named("decode-2").flip(Role.PREFILL, None)
        await flip_over(caller, Role.DECODE, None, DRAIN_SECONDS)
        assert last.status().role is Role.DECODE
    finally:
        await caller.close()


async def test_one_controller_at_a_time(flow: Flow) -> None:
    other = RouterActuator(flow.made.door_address, KEY, "other")
    try:
        assert await flow.made.actuator.held() and await flow.made.actuator.held()
        assert not await other.held()
        await other.release()
        assert not await other.held()
        await flow.made.actuator.release()
        assert await other.held()
    finally:
        await other.close()


async def test_an_unknown_role_is_refused(flow: Flow) -> None:
    with pytest.raises(InvalidRequest, match="there is no role 'encode'"):
        from deploy.runtime.roles import role_of

        role_of("encode")


def traces(folder: Path) -> set[str]:
    """Files in which a worker was told of."""
    return {path.name for path in folder.iterdir() if "process_name" in path.read_text()}


async def test_each_life_traces_its_steps_into_a_file_of_its_own(tiny_path: Path, tmp_path: Path) -> None:
    given = {"num_kv_blocks": "64", "profile": str(tmp_path / "steps.json")}
    model = load(tiny_path, "float32")  # its own: it gives up what it packs
    maker = WorkerMaker(read_settings(given), model, "127.0.0.1:1", "grpc", None)
    for role in (Role.DECODE, Role.PREFILL, Role.DECODE):
        made = await maker.make(role, await maker.drafts(role), "w", lambda: None)
        await made.end()
    assert traces(tmp_path) == {"steps.w.json", "steps.1.w.json", "steps.2.w.json"}
