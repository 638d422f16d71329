"""The in-process transport, and what every transport delivers to in the end: a receiver, which is a decode worker."""

from __future__ import annotations

from typing import Protocol

from kvcache.handoff.chunk import Chunk, Commit
from serving.messages import LeaseId

LOCAL = "local"


class Receiver(Protocol):
    """The receiving half: a decode worker. `via` names the transport, for its accounts.

    A handoff begins with the sender's `generation`, and a fence where it can leave out what is there already.
    """

    async def receive(self, chunk: Chunk, via: str = LOCAL) -> None: ...
    async def begin(self, fence: LeaseId | None, generation: str) -> int: ...
    async def commit(self, commit: Commit, via: str = LOCAL) -> range | None: ...


class LocalHandoff:
    """Hands chunks to a receiver in the same process (serving.links.HandoffLink)."""

    def __init__(self, receiver: Receiver, fence: LeaseId | None = None, generation: str = ""):
        self.receiver = receiver
        self.fence = fence
        self.generation = generation
        self.room = None

    async def begin(self) -> int:
        return await self.receiver.begin(self.fence, self.generation)

    async def push(self, chunk: Chunk) -> None:
        await self.receiver.receive(chunk)

    async def commit(self, commit: Commit) -> range | None:
        return await self.receiver.commit(commit)

    async def close(self) -> None:
        """Nothing is open."""
