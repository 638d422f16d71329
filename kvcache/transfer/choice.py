"""Which transports there are here beside gRPC, and both halves of those that `--kv-transport` means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvcache.transfer.lent_memory import GRPC, MemoryLender, MemoryLenders, TransferUnavailable
from kvcache.transfer.nixl_agent import KIND as NIXL
from kvcache.transfer.nixl_agent import installed
from kvcache.transfer.nixl_transport import NixlLender, NixlWriters
from kvcache.transfer.remote_write import RemoteWriters
from kvcache.transfer.shared_memory import KIND as SHM
from kvcache.transfer.shared_memory import SharedMemoryLender, SharedMemoryWriters, available
from serving.errors import InvalidRequest

log = logging.getLogger(__name__)

NOTHING_BEFORE: Mapping[str, Callable[[], MemoryLender]] = MappingProxyType({})

AUTO = "auto"
WITHIN_HOST = "host"  # as auto, of what opens no port to other hosts
LENDERS: dict[str, Callable[[], MemoryLender]] = {SHM: SharedMemoryLender, NIXL: NixlLender}
WRITERS: dict[str, Callable[[], RemoteWriters]] = {SHM: SharedMemoryWriters, NIXL: NixlWriters}


def chosen(kv_transport: str) -> tuple[str, ...]:
    """What `--kv-transport`, or WITHIN_HOST, means here beside gRPC, best first.

    Raises InvalidRequest if it cannot be had.
    """
    here = [kind for kind, there in ((SHM, available()), (NIXL, installed())) if there]  # best first
    if kv_transport == AUTO:
        return tuple(here)
    if kv_transport == WITHIN_HOST:
        return tuple(kind for kind in here if kind == SHM)
    if kv_transport == NIXL and NIXL not in here:
        raise InvalidRequest(
            "--kv-transport nixl needs the package nixl: pip install 'millrace[nixl]'", param="kv_transport"
        )
    if kv_transport == SHM and SHM not in here:
        raise InvalidRequest("--kv-transport shm needs Linux; choose grpc", param="kv_transport")
    return () if kv_transport == GRPC else (kv_transport,)


def lenders_on_demand(kv_transport: str) -> MemoryLenders:
    """Lenders that are made when they are first needed. Raises InvalidRequest if one is asked for and cannot be had."""
    return MemoryLenders({kind: LENDERS[kind] for kind in chosen(kv_transport)})


def lenders_for(kv_transport: str, before: Mapping[str, Callable[[], MemoryLender]] = NOTHING_BEFORE) -> MemoryLenders:
    """Lenders that have been made, for a worker to offer, those `before` others where they can be had.

    Raises InvalidRequest if one is asked for and cannot be.
    """
    lenders = MemoryLenders({**before, **{kind: LENDERS[kind] for kind in chosen(kv_transport)}})
    for kind in lenders.kinds:
        try:
            lenders.start(kind)
        except TransferUnavailable as error:
            if kind not in before and kv_transport not in (AUTO, WITHIN_HOST):
                raise InvalidRequest(f"--kv-transport {kv_transport}: {error}", param="kv_transport") from error
            log.warning("KV is not taken over %s: %s", kind, error)
    return lenders


def writers_for(kv_transport: str) -> dict[str, RemoteWriters]:
    """The sending halves, by their kinds. Raises InvalidRequest if one is asked for and cannot be had."""
    return {kind: WRITERS[kind]() for kind in chosen(kv_transport)}
