"""The words between a leader and the process of its host that stands for another one, beside those of any rank."""

from __future__ import annotations

from dataclasses import dataclass

from serving.rank_group.host_door import HostIdentity, HostSecurity
from serving.rank_group.host_plan import HostPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitHost:
    """Let in a host at the socket with this descriptor. Answered by HostCame, for each that has shown who it is."""

    listening: int
    identity: HostIdentity
    security: HostSecurity


@dataclass(frozen=True, slots=True)
class HostCame:
    """A host wants a place. Answered by TakeHost."""

    place: HostPlace
    where: str


@dataclass(frozen=True, slots=True)
class TakeHost:
    """It has the place, and the process stands for it from now on; or `refused` says why it is to try again."""

    refused: str | None = None
