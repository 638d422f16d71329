"""The ports on which millrace listens, all of them by name: on loopback, but for those that are asked for elsewhere."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.flow.listening import listening, place_of
from tests.flow.ports import free_port
from tests.flow.server import MillraceServer

ALL_ROLES = ("--prefill", "1", "--decode", "1", "--kvcache", "1", "--num-kv-blocks", "128")
WORKERS = ["prefill-0", "decode-0"]
KEYS = {"MILLRACE_API_KEY": "sk-ports", "MILLRACE_CLUSTER_KEY": "ports"}


def loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def test_the_scan_sees_a_socket_of_this_process() -> None:
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        listens.listen()
        assert listens.getsockname() in listening(os.getpid())
    assert place_of("0100007F:1F90") == ("127.0.0.1", 8080)
    assert place_of("0000000000000000FFFF00000100007F:0050") == ("127.0.0.1", 80)
    assert place_of("00000000000000000000000001000000:0050") == ("::1", 80)


def test_nothing_is_listened_on_beyond_loopback(tiny_path: Path) -> None:
    """The API, the router's gRPC, and one gRPC port for each worker and node of the pool: no other port at all."""
    with MillraceServer(str(tiny_path), *ALL_ROLES, workers=WORKERS) as server:
        found = listening(server.process.pid)
    assert [place for place in found if not loopback(place[0])] == []
    by_command = Counter(command for commands in found.values() for command in commands)
    assert by_command == {"serve": 2, "prefill": 1, "decode": 1, "kvcache": 1}
    assert ("127.0.0.1", server.port) in found


@pytest.mark.slow
def test_ranks_of_one_host_listen_there_alone(tiny_path: Path) -> None:
    """Also where other services are to be reached from elsewhere: what ranks send each other asks for no key."""
    asked = ("--grpc-host", "0.0.0.0", "-tp", "2", "--num-kv-blocks", "64", "--threads", "1")
    with MillraceServer(str(tiny_path), *asked, environ=KEYS) as server:
        found = listening(server.process.pid)
    assert [place for place in found if not loopback(place[0])] == []
    assert any("rank_process" in command for commands in found.values() for command in commands)


@pytest.mark.slow
def test_what_is_asked_for_is_listened_on_and_nothing_else(tiny_path: Path) -> None:
    grpc_port = free_port()
    asked = ("--host", "0.0.0.0", "--grpc-host", "0.0.0.0", "--grpc-port", str(grpc_port))
    with MillraceServer(str(tiny_path), *ALL_ROLES, *asked, workers=WORKERS, environ=KEYS) as server:
        found = listening(server.process.pid)
    beyond = {(place[1], *commands) for place, commands in found.items() if not loopback(place[0])}
    assert beyond == {(server.port, "serve"), (grpc_port, "serve")}
    assert Counter(command for commands in found.values() for command in commands)["serve"] == 2
