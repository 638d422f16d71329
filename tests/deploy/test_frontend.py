"""What the front tells of a fleet: in /health, red where a request sent now would fail, and why; in /metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.frontend import Frontend
from serving.api.settings import ServedModel
from serving.config import HttpConfig
from serving.messages import Role
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
    assert [line for line in lines if line.startswith("millrace:num_requests_running{")] == [
        'millrace:num_requests_running{engine="a",model_name="tiny"} 3.0'
    ]
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert sorted(set(samples)) == sorted(samples)
    await world.fleet.close()
