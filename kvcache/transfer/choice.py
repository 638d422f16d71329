"""Which ways beside gRPC there are here, and both halves of those that `--kv-transport` means."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcache.transfer.lent_memory import MemoryLender, MemoryLenders, RemoteWriters, TransferUnavailable
from kvcache.transfer.nixl_agent import KIND as NIXL
from kvcache.transfer.nixl_agent import installed
from kvcache.transfer.nixl_transport import NixlLender, NixlWriters
from kvcache.transfer.shared_memory import KIND as SHM
from kvcache.transfer.shared_memory import SharedMemoryLender, SharedMemoryWriters, available
from serving.errors import InvalidRequest

log = logging.getLogger(__name__)

GRPC = "grpc"

LENDERS: dict[str, Callable[[], MemoryLender]] = {SHM: SharedMemoryLender, NIXL: NixlLender}  # best first
WRITERS: dict[str, Callable[[], RemoteWriters]] = {SHM: SharedMemoryWriters, NIXL: NixlWriters}


def chosen(kv_transport: str) -> tuple[str, ...]:
    """What `--kv-transport` means here beside gRPC, best first. Raises InvalidRequest when it cannot be had."""
    here = [kind for kind, there in ((SHM, available()), (NIXL, installed())) if there]
    if kv_transport == "auto":
        return tuple(here)
    if kv_transport == NIXL and NIXL not in here:
        raise InvalidRequest(
            "--kv-transport nixl needs the package nixl: pip install 'millrace[nixl]'", param="kv_transport"
        )
    if kv_transport == SHM and SHM not in here:
        raise InvalidRequest("--kv-transport shm needs Linux; choose grpc", param="kv_transport")
    return () if kv_transport == GRPC else (kv_transport,)


def lenders_for(kv_transport: str) -> MemoryLenders:
    """What a worker offers beside gRPC. Raises InvalidRequest when it is asked for and cannot be had."""
    made = []
    for kind in chosen(kv_transport):
        try:
            made.append(LENDERS[kind]())
        except TransferUnavailable as error:
            if kv_transport != "auto":
                raise InvalidRequest(f"--kv-transport {kv_transport}: {error}", param="kv_transport") from error
            log.warning("KV is not taken over %s: %s", kind, error)
    return MemoryLenders(made)


def writers_for(kv_transport: str) -> dict[str, RemoteWriters]:
    """The sending halves, by their kinds. Raises InvalidRequest when one is asked for and cannot be had."""
    return {kind: WRITERS[kind]() for kind in chosen(kv_transport)}
