"""What the planner chooses between: groups of workers alike, each worker over so many devices.

Pure values. What they would do under a load, and whether they fit a machine, others say.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.messages import Role


@dataclass(frozen=True, order=True, slots=True)
class InstanceShape:
    """One worker: each of `pp` stages over `tp` devices."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.pp == 1 else f"TP{self.tp} PP{self.pp}"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` workers alike. `budget` is the tokens of a step at most, of workers that compute prompts."""

    role: Role
    shape: InstanceShape
    count: int = 1
    budget: int = 0

    @property
    def devices(self) -> int:
        return self.count * self.shape.devices

    def __str__(self) -> str:
        chunk = f" (steps of {self.budget})" if self.role == Role.MIXED and self.budget else ""
        return f"{self.count}×{self.shape} {self.role}{chunk}"


@dataclass(frozen=True, slots=True)
class CandidatePlacement:
    """`units` times these groups. KV moves inside a unit alone; with one unit, from any worker to any."""

    groups: tuple[InstanceGroup, ...]
    units: int = 1

    @property
    def devices(self) -> int:
        return self.units * sum(group.devices for group in self.groups)

    @property
    def split(self) -> bool:
        """True where prompts and decode steps have workers of their own."""
        return all(group.role != Role.MIXED for group in self.groups)

    @property
    def links(self) -> int:
        """Devices whose links a handoff takes: those of the smaller of the two workers, on either side."""
        return min(group.shape.devices for group in self.groups)

    def group(self, role: Role) -> InstanceGroup:
        """The one of this role. Raises KeyError."""
        for each in self.groups:
            if each.role == role:
                return each
        raise KeyError(role)

    @property
    def shapes(self) -> tuple[InstanceShape, ...]:
        """Of every worker there is."""
        return tuple(group.shape for group in self.groups for _ in range(group.count * self.units))

    def __str__(self) -> str:
        text = " + ".join(map(str, self.groups))
        return text if self.units == 1 else f"{self.units} units of {text}"


def aggregated(shape: InstanceShape, count: int, budget: int) -> CandidatePlacement:
    """Workers that do both."""
    return CandidatePlacement((InstanceGroup(Role.MIXED, shape, count, budget),))


def disaggregated(
    prefill: InstanceShape, prefills: int, decode: InstanceShape, decodes: int, budget: int, units: int = 1
) -> CandidatePlacement:
    """Workers for prompts, with steps of `budget` tokens, and others for decode steps."""
    groups = InstanceGroup(Role.PREFILL, prefill, prefills, budget), InstanceGroup(Role.DECODE, decode, decodes)
    return CandidatePlacement(groups, units)


@dataclass(frozen=True, slots=True)
class Rejection:
    """What was left out, and why, in a sentence a reader can act on."""

    what: str
    reason: str
