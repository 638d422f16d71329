"""Which services a deployment on Ray has, and in which placement group each of them sits. Pure: no Ray, no clock.

A placement group (a set) has a bundle for each service. Its bundles are fixed once it is made, so services added later
take bundles that others have left, or sets of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MOST = 1000  # services of a group: more is a slip of the finger


@dataclass(frozen=True, kw_only=True, slots=True)
class RayGroup:
    """Services that are started alike: `millrace` with these words, under names of the group and a number.

    `bundle` is what each reserves: cores, GPUs, bytes of memory, and the cluster's own resources, by Ray's names.
    """

    name: str
    kind: str
    count: int
    command: tuple[str, ...]
    bundle: Mapping[str, float]
    threads: int
    disk: str | None = None  # the folder in which each has one of its own


@dataclass(frozen=True, slots=True)
class RayService:
    """One service, by its name."""

    group: RayGroup
    number: int

    @property
    def name(self) -> str:
        return f"{self.group.name}-{self.number}"

    @property
    def command(self) -> tuple[str, ...]:
        disk = () if self.group.disk is None else (f"--disk={self.group.disk}/{self.name}",)
        return (*self.group.command, "--worker-name", self.name, *disk)


@dataclass(slots=True)
class Bundle:
    """A place in a set that fits services of a group; None sits in it, or one."""

    group: RayGroup
    service: RayService | None


@dataclass(slots=True)
class BundleSet:
    """A placement group: its number in the deployment, and its bundles in order."""

    number: int
    bundles: list[Bundle]

    def seated(self) -> Iterator[tuple[int, RayService]]:
        """Index and service of every bundle that is taken."""
        for index, bundle in enumerate(self.bundles):
            if bundle.service is not None:
                yield index, bundle.service


@dataclass(slots=True)
class RayLayout:
    """The sets there are, and the names of services that are to leave."""

    groups: Mapping[str, RayGroup]
    sets: list[BundleSet] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    flipped: dict[str, str] = field(default_factory=dict)  # workers that serve in another role than their group's
    _made: int = 0

    @classmethod
    def of(cls, groups: Sequence[RayGroup], sets: int) -> RayLayout:
        """Services k, k + sets, … of every group share a set: each set has some of all roles.

        Raises ValueError for more sets than the largest group has services.
        """
        largest = max(group.count for group in groups)
        if sets > largest:
            raise ValueError(f"[ray] sets = {sets}: the largest group has {largest} services, so some would be empty")
        layout = cls({group.name: group for group in groups})
        for own in range(sets):
            layout._add(RayService(group, number) for group in groups for number in range(own, group.count, sets))
        return layout

    def services(self) -> Iterator[tuple[BundleSet, int, RayService]]:
        """Everyone that sits somewhere, those that leave too: the set, the bundle's index, the service."""
        for one in self.sets:
            for index, service in one.seated():
                yield one, index, service

    def counts(self) -> dict[str, int]:
        """How many each group is to have: without those that leave."""
        counts = dict.fromkeys(self.groups, 0)
        for _, _, service in self.services():
            counts[service.group.name] += service.name not in self.leaving
        return counts

    def scale(self, wanted: Mapping[str, int]) -> None:
        """From now on these groups are to have so many services. Those of the highest numbers leave first.

        Raises ValueError for a group there is not, and for a number it cannot have; nothing has changed then.
        """
        check_scale(wanted, self.groups)
        for name, count in wanted.items():
            staying = sorted(
                service.number
                for _, _, service in self.services()
                if service.group.name == name and service.name not in self.leaving
            )
            self.leaving |= {f"{name}-{number}" for number in staying[count:]}
        self._grow(wanted)

    def let_go(self, name: str) -> None:
        """From now on the service of this name leaves; nothing where there is none."""
        self.leaving |= {service.name for _, _, service in self.services() if service.name == name}

    def kinds(self) -> dict[str, str]:
        """What each service that stays is now, by its name."""
        found = {service.name: service.group.kind for _, _, service in self.services()}
        return {name: self.flipped.get(name, kind) for name, kind in found.items() if name not in self.leaving}

    def add_one(self, kind: str) -> None:
        """One more of the first group of this kind; there is one."""
        name = next(group.name for group in self.groups.values() if group.kind == kind)
        self.scale({name: self.counts()[name] + 1})

    def left(self, name: str) -> BundleSet | None:
        """The service is gone and its bundle free. The set that has nobody any more and is given up, or None."""
        self.leaving.discard(name)
        self.flipped.pop(name, None)
        for one in self.sets:
            for bundle in one.bundles:
                if bundle.service is not None and bundle.service.name == name:
                    bundle.service = None
                    if not any(True for _ in one.seated()):
                        self.sets.remove(one)
                        return one
        return None

    def _grow(self, wanted: Mapping[str, int]) -> None:
        """Free bundles are filled first; what finds none shares one new set."""
        counts, homeless = self.counts(), []
        for name, count in wanted.items():
            group = self.groups[name]
            taken = {service.number for _, _, service in self.services() if service.group.name == name}
            unused = (number for number in range(MOST * 2) if number not in taken)
            for _ in range(count - counts[name]):
                service = RayService(group, next(unused))
                free = next((bundle for one in self.sets for bundle in one.bundles if _fits(bundle, group)), None)
                if free is None:
                    homeless.append(service)
                else:
                    free.service = service
        if homeless:
            self._add(homeless)

    def _add(self, services: Iterator[RayService] | list[RayService]) -> None:
        bundles = [Bundle(service.group, service) for service in services]
        self.sets.append(BundleSet(self._made, bundles))
        self._made += 1


def check_scale(wanted: Mapping[str, int], groups: Collection[str]) -> None:
    """Raises ValueError for groups there are not, and for numbers with which nothing could be served."""
    for name, count in wanted.items():
        if name not in groups:
            raise ValueError(f"there is no group {name!r}; there are {', '.join(groups)}")
        if not 1 <= count <= MOST:
            raise ValueError(f"{name}={count}: a group has from 1 to {MOST} services")


def _fits(bundle: Bundle, group: RayGroup) -> bool:
    return bundle.service is None and bundle.group.name == group.name
