"""The commit that ends a handoff: the first token, with a fence and a digest as every chunk of KV has.

A text goes on from that token, so a flipped bit of it would be as wrong as one of the KV. It knows no transport.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache.handoff.chunk import digest
from serving.errors import CorruptChunk
from serving.messages import LeaseId


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """All KV of the lease has been sent, and `first_token` follows the tokens it covers. `digest`: 16 bytes."""

    lease: LeaseId
    first_token: int
    digest: bytes

    def header(self) -> bytes:
        """The fields the digest covers, in one unambiguous string, which is no chunk's."""
        texts = (self.lease.lease, self.lease.instance)
        numbers = (self.lease.epoch, self.first_token, *map(len, texts))
        return "\0".join(["commit", *map(str, numbers), *texts]).encode()


def sealed_commit(lease: LeaseId, first_token: int) -> Commit:
    """The commit with its digest computed: XXH3-128."""
    bare = Commit(lease=lease, first_token=first_token, digest=b"")
    return replace(bare, digest=digest(bare.header(), b""))


def verify_commit(commit: Commit) -> None:
    """Raises CorruptChunk unless the digest is that of the fields."""
    if commit.digest != digest(commit.header(), b""):
        raise CorruptChunk("the commit of a handoff does not match its digest", code="digest")
