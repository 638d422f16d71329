"""A group with ranks on other hosts: one process's text, whoever is lost, and hosts that come back.

The hosts are processes that the leader did not start, in a namespace of processes of their own where that may be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serving.forward.forward import EagerForward
from serving.loader import quantize_at_load
from serving.loader.loading import load
from serving.rank_group.child import RANK_MODULE, RankProcess
from serving.rank_group.epochs import GroupEpochs
from serving.rank_group.host_door import HostSecurity
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.leader import SpreadModel
from serving.rank_group.ranks import LOAD_SECONDS, RankGroup
from tests.certificates import SERVICE, Authority
from tests.fakes.stopping import harm
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import (
    LENGTHS,
    NEEDS_KERNELS,
    Side,
    alone,
    compiled_alone,
    group_forward,
    harmed,
    in_int8,
    own_planes,
    pids,
    prompt,
)
from tests.serving.rank_group.hosts import HostProcess, can_be_apart, free_port, spread_over_hosts

ALL = range(len(LENGTHS))
BACK_SECONDS = 120.0  # that a busy machine may need to start a process


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def port() -> int:
    return free_port()


def until_there(spread: SpreadModel, ranks: int, group: Side, reference: Side) -> None:
    """Sequence by sequence in turn, steps until so many ranks are in the group again."""
    until, turn = time.monotonic() + BACK_SECONDS, 0
    came = threading.Event()
    while spread.ranks.there < ranks:
        assert time.monotonic() < until, "the host does not come back"
        came.wait(0.2)
        if any(keeper.offers for keeper in spread.ranks.keepers):
            group.step([turn])
            reference.step([turn])
            turn += 1


@NEEDS_KERNELS
def test_compiled_ranks_on_two_hosts_have_the_bits_of_one_process(mixtral: Path, port: int, tmp_path: Path) -> None:
    """One of them with two ranks and one with one, which are known to the leader by nothing but their connections."""
    theirs, environ, apart = Authority().files(tmp_path), {"MILLRACE_CLUSTER_KEY": "key"}, can_be_apart()
    key = HostSecurity(
        cluster_key="key",
        certfile=str(theirs.certificate),
        keyfile=str(theirs.key),
        authorities=str(theirs.authorities),
        server_name=SERVICE,
    )
    hosts = [
        HostProcess(mixtral, port, 4, start, local, arguments=theirs.flags(), environ=environ, apart=apart)
        for start, local in ((3, 1), (1, 2))
    ]
    one = Side(compiled_alone(mixtral))
    with spread_over_hosts(mixtral, hosts, ranks=4, local=1, security=key) as spread:
        group = Side(group_forward(spread, compiled=True))
        assert (spread.ranks.there, spread.ranks.size, spread.ranks.mapping) == (4, 3, 1)
        for _ in range(3):
            assert torch.equal(group.step(ALL), one.step(ALL))
        for sequence in ALL:
            assert torch.equal(group.step([sequence]), one.step([sequence]))
        assert group.tokens == one.tokens
        totals = spread.ranks.totals
        assert totals.bytes_to_hosts > totals.traffic.dispatch_bytes > 0, "rows cross the network once for each host"
        assert totals.bytes_from_hosts > totals.traffic.combine_bytes > 0
        assert spread.ranks.counts.losses == 0
    for host in hosts:
        assert "out of the group" in host.log.read_text(), "it knows that the leader has left, and asks for it again"


@pytest.mark.slow
@NEEDS_KERNELS
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("dtype", "int8"), [("bfloat16", False), ("bfloat16", True), ("float32", True)])
def test_rows_cross_the_network_as_experts_multiply_them(
    dtype: str,
    int8: bool,
    compiled: bool,
    mixtral: Path,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """INT8 rows to INT8 experts; results in float32 from kernels, and in the model's type from its modules."""
    torch.set_num_threads(1)
    with monkeypatch.context() as quantizing:  # the hosts find kernels where they are, and compile none
        quantizing.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        quantizing.setattr(quantize_at_load, "calibration_tokens", lambda path, longest: [prompt(0, 40)])
        folder = in_int8(mixtral, tmp_path / "int8", dtype) if int8 else mixtral
    host = HostProcess(folder, port, 2, 1, 1, dtype=dtype)
    loaded = load(folder, dtype)
    one = Side(compiled_alone(folder, dtype) if compiled else EagerForward(loaded.model, own_planes(loaded)))
    with spread_over_hosts(folder, [host], ranks=2, local=1, dtype=dtype) as spread:
        group = Side(group_forward(spread, compiled=compiled))
        for _ in range(3):
            assert torch.equal(group.step(ALL), one.step(ALL))
        for sequence in ALL:
            assert torch.equal(group.step([sequence]), one.step([sequence]))
        assert spread.ranks.counts.losses == 0
        shape = spread.ranks.own.exchange.shape  # type: ignore[union-attr]
        assert shape.wire is (torch.int8 if int8 else torch.bfloat16)
        assert shape.back is (torch.float32 if compiled or dtype == "float32" else torch.bfloat16)


@pytest.fixture
def pair(
    mixtral: Path, port: int, request: pytest.FixtureRequest
) -> Iterator[tuple[SpreadModel, Side, Side, HostProcess]]:
    """Two ranks here and two there: the group, its steps, those of one process, and the host."""
    compiled = bool(request.param)
    host = HostProcess(mixtral, port, 4, 2, 2, apart=False)
    reference = Side(compiled_alone(mixtral) if compiled else alone(mixtral))
    with spread_over_hosts(mixtral, [host], ranks=4, local=2, deadline=5.0) as spread:
        yield spread, Side(group_forward(spread, compiled=compiled)), reference, host


EITHER = pytest.mark.parametrize("pair", [False, pytest.param(True, marks=NEEDS_KERNELS)], indirect=True)
TORCH = pytest.mark.parametrize("pair", [False], indirect=True)


@pytest.mark.parametrize("loaded", [False, True], ids=["while it loads", "when it has loaded"])
def test_a_host_that_is_lost_before_there_is_a_group_is_waited_for_again(
    loaded: bool, mixtral: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is lost twice. Nobody has to start the leader anew for it, which may have loaded for minutes."""
    host = HostProcess(mixtral, port, 4, 2, 2)
    does, left = (RankGroup._mapped if loaded else RankGroup._loaded), [2, 2]

    def lost_before(group: RankGroup, other: RankProcess) -> None:
        if other.rank in left:
            left.remove(other.rank)
            host.again()
            other.process.wait(BACK_SECONDS)
        does(group, other)

    monkeypatch.setattr(RankGroup, does.__name__, lost_before)
    reference = Side(alone(mixtral))
    with spread_over_hosts(mixtral, [host], ranks=4, local=2) as spread:
        group = Side(group_forward(spread))
        for _ in range(2):
            group.step(ALL)
            reference.step(ALL)
        assert group.tokens == reference.tokens
        assert (spread.ranks.there, spread.ranks.counts.losses, left) == (4, 0, [])
        assert spread.ranks.totals.bytes_to_hosts > 0
    assert caplog.text.count("the host of ranks 2 to 3 is waited for") == 2


@pytest.mark.parametrize("of", [GroupEpochs, RankGroup], ids=["as the epoch begins", "when it has begun"])
def test_a_host_that_is_lost_before_the_first_step_is_done_without(
    of: type, mixtral: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, name = HostProcess(mixtral, port, 4, 2, 2), {GroupEpochs: "_begin", RankGroup: "use_planes"}[of]
    does, left = getattr(of, name), [2]

    def lost_before(group: RankGroup | GroupEpochs, told: object) -> object:
        if left:
            others = group.others if isinstance(group, RankGroup) else [*group.others.values()]
            host.close()
            others[-1].process.wait(BACK_SECONDS)
            left.clear()
        return does(group, told)

    monkeypatch.setattr(of, name, lost_before)
    reference = Side(alone(mixtral))
    with spread_over_hosts(mixtral, [host], ranks=4, local=2) as spread:
        group = Side(group_forward(spread))
        for _ in range(2):
            group.step(ALL)
            reference.step(ALL)
        assert group.tokens == reference.tokens
        assert (spread.ranks.there, spread.ranks.counts.losses, spread.ranks.lost) == (2, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lost"), [("_hold", [0]), ("_hold", [0, 1]), ("_begin", [1]), ("_begin", [0, 1])])
def test_of_two_hosts_any_that_are_lost_as_the_first_epoch_begins_are_done_without(
    stage: str, lost: list[int], mixtral: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [HostProcess(mixtral, port, 4, start, 1) for start in (2, 3)]
    does, left = getattr(GroupEpochs, stage), list(lost)

    def lost_before(group: GroupEpochs, told: object) -> object:
        while left:
            number = left.pop()
            hosts[number].close()
            group.others[2 + number].process.wait(BACK_SECONDS)
        return does(group, told)

    monkeypatch.setattr(GroupEpochs, stage, lost_before)
    reference = Side(alone(mixtral))
    with spread_over_hosts(mixtral, hosts, ranks=4, local=2) as spread:
        group = Side(group_forward(spread))
        for _ in range(2):
            group.step(ALL)
            reference.step(ALL)
        assert group.tokens == reference.tokens
        assert (spread.ranks.there, spread.ranks.lost) == (4 - len(lost), None)


def test_a_host_that_does_not_come_again_before_there_is_a_group_is_told_of(
    mixtral: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, loads, again = HostProcess(mixtral, port, 4, 2, 2), RankGroup._loaded, HostLobby.again

    def lost_before(group: RankGroup, other: RankProcess) -> None:
        if other.rank == 2:
            host.close()
        loads(group, other)

    def not_for_long(lobby: HostLobby, rank: int, *, until: float) -> RankProcess:
        assert until - time.monotonic() <= LOAD_SECONDS
        return again(lobby, rank, until=time.monotonic() + 1.0)

    monkeypatch.setattr(RankGroup, "_loaded", lost_before)
    monkeypatch.setattr(HostLobby, "again", not_for_long)
    with (
        pytest.raises(ValueError, match="has not come again with ranks 2 to 3: start it, and this worker again"),
        spread_over_hosts(mixtral, [host], ranks=4, local=2),
    ):
        raise AssertionError("there is no group")


@EITHER
def test_a_host_that_is_killed_in_a_step_is_done_without_and_comes_back(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    spread, group, reference, host = pair
    for layer_done in (None, harmed(host.process.pid, signal.SIGKILL), None):
        group.step(ALL, layer_done)
        reference.step(ALL)
    counts = spread.ranks.counts
    assert (counts.losses, counts.repeated_steps, spread.ranks.there) == (1, 1, 2)
    assert counts.loaded_experts > 0, "what the host held is read again by those that are left"
    host.again()
    until_there(spread, 4, group, reference)
    sent = spread.ranks.totals.bytes_to_hosts
    for _ in range(2):
        group.step(ALL)
        reference.step(ALL)
    assert group.tokens == reference.tokens
    assert spread.ranks.totals.bytes_to_hosts > sent, "its experts are used again"
    assert (counts.losses, counts.admitted, spread.ranks.lost) == (1, 1, None)


@TORCH
def test_a_host_that_stands_still_is_given_up_at_the_deadline(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    spread, group, reference, host = pair
    for layer_done in (None, harmed(host.process.pid, signal.SIGSTOP), None):
        began = time.monotonic()
        group.step(ALL, layer_done)
        reference.step(ALL)
        if layer_done is not None:
            assert time.monotonic() - began > 5.0
    assert (spread.ranks.counts.losses, spread.ranks.there) == (1, 2)
    assert group.tokens == reference.tokens


@EITHER
def test_a_rank_of_the_leaders_host_that_is_lost_costs_no_host(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    """The host drops the step with the others, takes over experts, and both go on with the rank when it is back."""
    spread, group, reference, _ = pair
    victim = pids(spread)[0]
    for layer_done in (None, harmed(victim, signal.SIGKILL), None):
        group.step(ALL, layer_done)
        reference.step(ALL)
    counts = spread.ranks.counts
    left = spread.ranks.there - counts.admitted  # it may be back within a step
    assert (counts.losses, counts.repeated_steps, left) == (1, 1, 3)
    assert counts.loaded_experts > 0
    until_there(spread, 4, group, reference)
    group.step(ALL)
    reference.step(ALL)
    assert group.tokens == reference.tokens
    assert (counts.losses, counts.admitted) == (1, 1)


def ranks_of(host: HostProcess) -> list[int]:
    children = Path(f"/proc/{host.process.pid}/task").glob("*/children")
    found = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in found if RANK_MODULE in Path(f"/proc/{pid}/cmdline").read_text()]


@TORCH
def test_a_rank_of_a_host_is_lost_with_its_host_which_comes_back_by_itself(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    """Also between steps, when nobody computes; the other rank ends, and both begin anew."""
    spread, group, reference, host = pair
    group.step(ALL)
    reference.step(ALL)
    ranks = ranks_of(host)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    until = time.monotonic() + BACK_SECONDS
    while not any(keeper.current.ending for keeper in spread.ranks.keepers):
        assert time.monotonic() < until, "the leader's host does not hear of it"
        time.sleep(0.001)
    group.step(ALL)
    reference.step(ALL)
    assert (spread.ranks.counts.losses, spread.ranks.there) == (1, 2)
    until_there(spread, 4, group, reference)
    group.step(ALL)
    reference.step(ALL)
    assert group.tokens == reference.tokens
    assert "the process of rank 2 has ended" in host.log.read_text()
    assert not set(ranks) & set(ranks_of(host))
    assert spread.ranks.counts.losses == 1


@TORCH
def test_ranks_of_a_host_leave_with_it(pair: tuple[SpreadModel, Side, Side, HostProcess]) -> None:
    _, group, _, host = pair
    group.step(ALL)
    ranks = ranks_of(host)
    harm(host.process.pid, signal.SIGKILL)
    until = time.monotonic() + BACK_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < until
        time.sleep(0.01)


def until_said(host: HostProcess, words: str) -> None:
    until = time.monotonic() + BACK_SECONDS
    while words not in host.log.read_text():
        assert time.monotonic() < until, host.log.read_text()
        time.sleep(0.01)


@TORCH
def test_a_host_that_is_told_to_leave_stays_until_its_group_ends_and_joins_no_other(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    """Who replaces all pods of a worker tells them at once, and starts the next worker when this one has drained."""
    spread, group, reference, host = pair
    harm(host.process.pid, signal.SIGTERM)
    until_said(host, "SIGTERM: leaving when nobody needs it any more, in 120 s at the latest")
    for _ in range(2):
        group.step(ALL)
        reference.step(ALL)
    assert group.tokens == reference.tokens
    assert (spread.ranks.there, spread.ranks.counts.losses, host.process.poll()) == (4, 0, None)
    spread.ranks.close()
    assert host.process.wait(BACK_SECONDS) == 0
    assert host.log.read_text().count("of the group whose leader") == 1
    assert "not in the group yet" not in host.log.read_text().partition("out of the group")[2]


@TORCH
def test_a_host_that_is_told_to_leave_while_it_is_in_no_group_leaves_at_once(
    pair: tuple[SpreadModel, Side, Side, HostProcess],
) -> None:
    spread, _, _, host = pair
    spread.ranks.close()
    until_said(host, "out of the group")
    until_said(host, "nobody answers at")
    harm(host.process.pid, signal.SIGTERM)
    assert host.process.wait(BACK_SECONDS) == 0
    assert "SIGTERM as a host of ranks that is in no group: leaving" in host.log.read_text()
