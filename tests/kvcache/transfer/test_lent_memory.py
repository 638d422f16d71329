"""Lenders to one peer: kinds that fail are passed over once, however many transfers find out together."""

from __future__ import annotations

import asyncio

import numpy as np

from kvcache.transfer.lent_memory import TRANSFER_BYTES, MemoryLender, MemoryLenders, PeerLender, TransferUnavailable
from serving.messages import TransportOffer


class Plain(MemoryLender):
    """Memory of this process."""

    kind = "plain"

    def __init__(self) -> None:
        memory = np.zeros(2 * TRANSFER_BYTES, dtype=np.uint8)
        super().__init__(TransportOffer(kind=self.kind, details=b""), memory, 0, 1.0)


def broken() -> MemoryLender:
    raise TransferUnavailable("it never starts")


async def test_two_transfers_that_meet_a_lender_that_fails_both_take_the_next() -> None:
    peer = PeerLender(MemoryLenders({"broken": broken, "plain": Plain}))
    lent = await asyncio.gather(peer.lend(), peer.lend())
    assert [one.kind for one in lent] == ["plain", "plain"]


async def test_with_no_lender_left_nothing_is_lent() -> None:
    peer = PeerLender(MemoryLenders({"broken": broken}))
    assert [bool(one) for one in await asyncio.gather(peer.lend(), peer.lend(), peer.lend())] == [False] * 3
