"""What the front tells of a fleet: in /health, red where a request sent now would fail, and why; in /metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import frontend
from deploy.frontend import CROWD, Frontend, served_model
from router.admission import Claim
from serving.api.settings import ServedModel
from serving.config import HttpConfig, ModelConfig
from serving.messages import Role
from tests.deploy.test_generation_config import SPEC
from tests.fakes.generate import tiny_tokenizer
from tests.router.conftest import World

MIXED, PREFILL, DECODE = Role.MIXED, Role.PREFILL, Role.DECODE


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def front_of(world: World, folder: Path, listening: socket.socket) -> Frontend:
    served = ServedModel(names=("tiny",), max_model_len=64, vocab_size=384, created=1)
    return Frontend(world.placer, HttpConfig(), served, tiny_tokenizer(folder), listening)


def health_of(world: World, folder: Path, listening: socket.socket) -> tuple[bool, str]:
    return front_of(world, folder, listening).health()


@pytest.mark.parametrize(
    ("roles", "split"),
    [
        ((MIXED,), False),
        ((MIXED, MIXED), False),
        ((MIXED, PREFILL), True),
        ((MIXED, DECODE), True),
        ((PREFILL, DECODE), True),
    ],
)
async def test_a_fleet_without_a_split_pair_is_red_where_every_request_is_to_be_split(
    roles: tuple[Role, ...], split: bool, tmp_path: Path, listening: socket.socket
) -> None:
    for strict in (False, True):
        world = World(strict_disaggregation=strict)
        for number, role in enumerate(roles):
            world.add(str(number), role)
        well, why = health_of(world, tmp_path, listening)
        assert well == (split or not strict)
        assert well or "--strict-disaggregation" in why
        await world.fleet.close()


async def test_workers_that_do_not_pair_are_no_split_pair(tmp_path: Path, listening: socket.socket) -> None:
    world = World(strict_disaggregation=True)
    world.add("p", PREFILL, pairing="another")
    world.add("d", DECODE)
    assert not health_of(world, tmp_path, listening)[0]
    await world.fleet.close()


async def test_metrics_have_one_worker_of_a_name(tmp_path: Path, listening: socket.socket) -> None:
    """A worker that has left is remembered for a while; the next of its name may be there before that is over."""
    world = World()
    world.add("a", instance="a-1", address="local:1", draining=True, running=7)
    world.add("a", instance="a-2", address="local:2", running=3)
    lines = front_of(world, tmp_path, listening).metrics.text().decode().splitlines()
    assert 'millrace:num_requests_running{model_name="tiny"} 3.0' in lines
    assert [line for line in lines if line.startswith("millrace:worker_num_requests_running{")] == [
        'millrace:worker_num_requests_running{engine="a",model_name="tiny"} 3.0'
    ]
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert sorted(set(samples)) == sorted(samples)
    await world.fleet.close()


class Counted:
    """A table of connections of which there are so many, one number after the other."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return self.counts.pop(0)


async def test_memory_is_given_back_once_when_a_crowd_has_gone(
    tmp_path: Path, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes little by little; what comes and goes in small numbers changes nothing."""
    front = front_of(World(), tmp_path, listening)
    counts = [0, 9, 0, CROWD + 5, CROWD // 2, 4, 4, CROWD, 10]
    left: list[int] = []
    monkeypatch.setattr(frontend, "TIDY_SECONDS", 0.0)
    monkeypatch.setattr(frontend, "give_back_memory", lambda: left.append(len(counts)))
    monkeypatch.setattr(front.server, "table", Counted(counts))
    with pytest.raises(IndexError):
        await front._give_back_memory()
    assert left == [3]


def test_a_model_is_served_under_the_names_it_is_given(tmp_path: Path) -> None:
    given = ModelConfig(served_model_name=("large", "small"))
    assert served_model(tmp_path, given, 64, SPEC, None).names == ("large", "small")
    assert served_model(tmp_path, ModelConfig(), 64, SPEC, None).names == (tmp_path.name,)


async def test_metrics_have_the_prompt_tokens_of_requests_that_wait(tmp_path: Path, listening: socket.socket) -> None:
    world = World()
    front = front_of(world, tmp_path, listening)
    async with world.placer.admission.enter(Claim(0, "", 30)):
        assert b'millrace:router_prompt_tokens_waiting{model_name="tiny"} 30.0' in front.metrics.text()
    await world.fleet.close()
