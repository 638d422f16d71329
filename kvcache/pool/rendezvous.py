"""Which nodes of the pool own a key: rendezvous hashing, for which clients need to agree on the members alone.

Pure: addresses and a key in, addresses out. It knows neither which nodes answer nor what a key stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


class RendezvousHash:
    """Every node draws a score for every key; the highest own it (Thaler and Ravishankar, 1998).

    A node that comes or goes changes no other node's scores, so it moves its own share of the keys and nothing else.
    Nodes are written `host:port` or `name@host:port`. A name is what scores are drawn by: a node that comes back under
    its name at another port owns what its disk still holds.
    """

    def __init__(self, nodes: Iterable[str] = ()):
        names: dict[str, str] = {}
        for node in sorted(nodes, key=lambda node: "@" in node):  # of two ways to write a node, the named one counts
            name, _, address = node.rpartition("@")
            names[address] = name or address
        self.nodes = tuple(sorted(names))  # addresses
        self._salts = [(address, blake2b(names[address].encode(), digest_size=32).digest()) for address in self.nodes]

    def owners(self, key: bytes, replication: int = 1) -> tuple[str, ...]:
        """Addresses of where the key belongs, best first: `replication` nodes, or all where there are fewer."""
        scores = [(blake2b(key, digest_size=8, key=salt).digest(), address) for address, salt in self._salts]
        if replication == 1 and scores:
            return (max(scores)[1],)
        return tuple(address for _, address in sorted(scores, reverse=True)[:replication])
