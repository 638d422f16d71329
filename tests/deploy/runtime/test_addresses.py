"""Addresses that others are told lead here."""

from __future__ import annotations

import socket

import pytest

from deploy.runtime.addresses import announced, near
from serving.config import ClusterConfig


def test_an_address_that_leads_nowhere_is_never_announced() -> None:
    found = announced(ClusterConfig(grpc_host="0.0.0.0"), 5000, ["127.0.0.1:8100"])
    assert found == "127.0.0.1:5000"


def test_a_service_that_listens_everywhere_is_reached_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = listening.getsockname()[1]
        host, _, told = announced(ClusterConfig(grpc_host="0.0.0.0"), port, ["localhost:1"]).rpartition(":")
        socket.create_connection((host.strip("[]"), int(told)), timeout=30).close()


@pytest.mark.parametrize("peers", [[], ["nonsense"], ["127.0.0.1:port"], ["nonsense", "127.0.0.1:1"]])
def test_without_a_way_to_a_peer_it_is_this_host(peers: list[str]) -> None:
    assert announced(ClusterConfig(grpc_host="0.0.0.0"), 5000, peers) == "127.0.0.1:5000"


def test_what_is_said_outright_is_announced_as_it_is() -> None:
    assert announced(ClusterConfig(grpc_host="0.0.0.0", advertise="gpu-7:90"), 5000, []) == "gpu-7:90"
    assert announced(ClusterConfig(grpc_host="10.0.0.5"), 5000, ["127.0.0.1:1"]) == "10.0.0.5:5000"


def test_children_reach_what_listens_on_one_address_only_there() -> None:
    assert [near(host) for host in ("0.0.0.0", "127.0.0.1", "10.0.0.5", "[::]")] == [
        "127.0.0.1",
        "127.0.0.1",
        "10.0.0.5",
        "[::1]",
    ]
