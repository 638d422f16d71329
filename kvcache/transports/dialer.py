"""Opens handoffs to decode workers by the lease's grant: the first transport on offer that this process has too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvcache.transports.carriers import Carrier, CarrierFailed, Carriers, Landing
from kvcache.transports.local import LocalHandoff, Receiver
from kvcache.transports.nixl_agent import KIND as NIXL
from kvcache.transports.nixl_agent import installed
from kvcache.transports.stream import GrpcHandoff
from kvcache.transports.written import NixlCarriers, NixlLanding
from serving.errors import InvalidRequest
from serving.links import HandoffLink
from serving.messages import LeaseGrant
from serving.rpc import Caller

log = logging.getLogger(__name__)

_CARRIERS: dict[str, Callable[[], Carriers]] = {NIXL: NixlCarriers}


def chosen(kv_transport: str) -> str | None:
    """The transport beside gRPC that `--kv-transport` means here. Raises InvalidRequest when it cannot be had."""
    if kv_transport == "grpc" or (kv_transport == "auto" and not installed()):
        return None
    if not installed():
        raise InvalidRequest(
            "--kv-transport nixl needs the package nixl: pip install 'millrace[nixl]'", param="kv_transport"
        )
    return NIXL


def landing_for(kv_transport: str) -> Landing | None:
    """What a decode worker offers beside gRPC. Raises InvalidRequest when it is asked for and cannot be had."""
    if chosen(kv_transport) is None:
        return None
    try:
        return NixlLanding()
    except CarrierFailed as error:
        if kv_transport != "auto":
            raise InvalidRequest(f"--kv-transport {kv_transport}: {error}", param="kv_transport") from error
        log.warning("KV is taken over gRPC alone: %s", error)
        return None


class Dialer:
    """See the module. `local` maps in-process names to receivers, everything else is reached as host:port."""

    def __init__(
        self,
        local: dict[str, Receiver] | None = None,
        cluster_key: str | None = None,
        kv_transport: str = "grpc",
    ):
        self.local = local if local is not None else {}
        self.cluster_key = cluster_key
        kind = chosen(kv_transport)
        self._carriers = {kind: _CARRIERS[kind]()} if kind is not None else {}
        self._callers: dict[str, Caller] = {}

    async def prepare(self) -> None:
        """Start what takes a while, NIXL half a second, so that the first handoff need not wait for it."""
        for carriers in self._carriers.values():
            await asyncio.to_thread(carriers.prepare)

    def dial(self, grant: LeaseGrant) -> HandoffLink:
        receiver = self.local.get(grant.address)
        if receiver is not None:
            return LocalHandoff(receiver)
        caller = self._callers.get(grant.address)
        if caller is None:
            caller = self._callers[grant.address] = Caller(grant.address, self.cluster_key)
        return GrpcHandoff(caller, self._carrier(grant))

    def _carrier(self, grant: LeaseGrant) -> Carrier | None:
        for offer in grant.transports:
            if offer.kind in self._carriers:
                return self._carriers[offer.kind].carrier(offer)
        return None

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
        self._callers.clear()
        for carriers in self._carriers.values():
            carriers.close()
