"""Ports for processes that are told where to listen, and may be told so again when they are started once more.

Knows nothing of who listens there.
"""

from __future__ import annotations

import random
import socket
from functools import cache
from pathlib import Path

LOWEST = 20_000  # below are those of known services
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")

_taken: list[socket.socket] = []
_chance = random.SystemRandom()  # not the one that property tests seed


def free_port() -> int:
    """A port that no other test asks for while this process lives, and that the kernel gives to nobody by itself.

    A port that the kernel has chosen is its own to choose again as soon as it is free: for a connection that somebody
    makes, or for a server beside this one, before the process that was to have it has started.
    """
    while True:
        port = _chance.choice(candidates())
        if _is_free(port) and _take(port):
            return port


@cache
def candidates() -> tuple[int, ...]:
    low, high = map(int, GIVEN_OUT.read_text().split())
    found = tuple(port for port in range(LOWEST, 1 << 16) if not low <= port <= high)
    assert found, f"the kernel gives out every port from {LOWEST} by itself: {GIVEN_OUT}"
    return found


def _take(port: int) -> bool:
    """Among test processes, by a name that the kernel forgets with the process."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0millrace-test-port-{port}")
    except OSError:
        name.close()
        return False
    _taken.append(name)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
