"""What travels beside a stream: bytes in host memory, or bytes that a device holds and that are written from there."""

from __future__ import annotations

from typing import Protocol


class HeldPayload(Protocol):
    """Bytes on a device of this process, which stay there as long as anybody holds this."""

    @property
    def address(self) -> int:
        """Where they begin, as the device counts."""
        ...

    def __len__(self) -> int: ...

    def to_host(self) -> memoryview:
        """A copy in host memory. The calling thread waits for it: not on the event loop."""
        ...


class Room(Protocol):
    """Where on a device payloads may be made that are written from there (kvcache.memory.device_room)."""

    def takes(self, size: int) -> bool:
        """Whether a payload may have so many bytes."""
        ...


Payload = bytes | memoryview | HeldPayload
