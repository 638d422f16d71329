"""Which routers there are now: addresses as they are named, and every address of the names marked with `dns:`.

It resolves names and says what it found; it may not know what is sent to a router.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from deploy.runtime.lookups import in_a_daemon

log = logging.getLogger(__name__)

LOOKED_UP = "dns:"
LAST_PORT = 65535
LOOKUP_SECONDS = 5.0  # from one look at the names to the next

LookUp = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host's name, each with this port. Raises OSError."""


async def look_up(host: str, port: int) -> list[str]:
    """host:port of every address the name has: of a headless service, of each of its pods. Raises OSError."""
    found = await in_a_daemon(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    hosts = {str(address[0]) for *_, address in found}
    return sorted(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts)


class RouterDirectory:
    """`now()` looks all marked names up at once; one that cannot be resolved keeps the addresses it had last.

    `routers` is as in `--routers`: `a:8100, dns:routers.default.svc:8100`. Raises ValueError for what can be no name
    with a port.
    """

    def __init__(self, routers: str | None, lookup: LookUp = look_up):
        named = addresses(routers)
        self.fixed = [one for one in named if not one.startswith(LOOKED_UP)]
        self.names = [_parted(one) for one in named if one.startswith(LOOKED_UP)]
        self.lookup = lookup
        self._last: dict[tuple[str, int], list[str]] = {}
        self._unknown: set[tuple[str, int]] = set()  # of which it was said that they have no address

    async def now(self) -> list[str]:
        """Each router's host:port, once."""
        await asyncio.gather(*(self._ask(name) for name in self.names))
        found = [address for name in self.names for address in self._last.get(name, ())]
        return list(dict.fromkeys([*self.fixed, *found]))

    async def _ask(self, name: tuple[str, int]) -> None:
        try:
            self._last[name] = await self.lookup(*name)
            self._unknown.discard(name)
        except OSError as error:
            if name not in self._unknown:
                self._unknown.add(name)
                log.warning("no address is found for %s: %s; asking again", name[0], error)


def addresses(text: str | None) -> list[str]:
    """`a:1, b:2` → ["a:1", "b:2"]."""
    return [address.strip() for address in (text or "").split(",") if address.strip()]


def peers_of(routers: str | None) -> list[str]:
    """host:port of every router or its name, for whoever only asks which way leads there."""
    return [address.removeprefix(LOOKED_UP) for address in addresses(routers)]


def _parted(marked: str) -> tuple[str, int]:
    host, _, port = marked.removeprefix(LOOKED_UP).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not _resolvable(host) or not (port.isdecimal() and 1 <= int(port) <= LAST_PORT):
        raise ValueError(f"--routers {marked}: a name and a port, such as {LOOKED_UP}routers.default.svc:8100")
    return host, int(port)


def _resolvable(host: str) -> bool:
    """False for names that `getaddrinfo` fails over, as those with an empty part or one of more than 63 letters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True
