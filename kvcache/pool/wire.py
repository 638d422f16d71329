"""The pool's listings and events to protobuf and back, field by field; it decides nothing.

What nodes report of themselves is in serving/wire.py, since routers read it too.
"""

from __future__ import annotations

from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent, Tier
from serving.proto import pool_pb2 as pb


def selection_to_pb(what: BlockSelection) -> pb.Selection:
    return pb.Selection(namespace=what.namespace, keys=what.keys)


def selection_from_pb(message: pb.Selection) -> BlockSelection:
    return BlockSelection(
        namespace=message.namespace if message.HasField("namespace") else None, keys=tuple(message.keys)
    )


def entry_to_pb(entry: BlockEntry) -> pb.PoolEntry:
    return pb.PoolEntry(
        key=entry.key,
        namespace=entry.namespace,
        bytes=entry.bytes,
        tiers=[tier.value for tier in entry.tiers],
        age_seconds=entry.age_seconds,
        pinned=entry.pinned,
    )


def entry_from_pb(message: pb.PoolEntry) -> BlockEntry:
    return BlockEntry(
        key=message.key,
        namespace=message.namespace,
        bytes=message.bytes,
        tiers=tuple(Tier(tier) for tier in message.tiers),
        age_seconds=message.age_seconds,
        pinned=message.pinned,
    )


def event_to_pb(event: PoolEvent) -> pb.PoolEvent:
    return pb.PoolEvent(kind=event.kind, keys=event.keys, sequence=event.sequence)


def event_from_pb(message: pb.PoolEvent) -> PoolEvent:
    return PoolEvent(kind=message.kind, keys=tuple(message.keys), sequence=message.sequence)
