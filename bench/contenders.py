"""Who is compared with whom: servers of this checkout by their flags, and servers that run elsewhere by address.

Pure: it names contenders and reads their flags, and starts nothing. The first contender of a comparison is the one
that ratios are against.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POLICIES = ("goodput", "least_loaded", "round_robin", "prefix_aware")
FLEET_ROLES = ("mixed", "prefill", "decode")
CHUNKS = (64, 128, 256, 512, 1024)  # tokens a step, of the sweep of fixed budgets
NO_SHEDDING = "{folder}/no-shedding.toml"  # written by who starts the server
NO_SHEDDING_TOML = "[interactive]\nshed = false\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A server to measure: `flags` of `millrace serve`, or the `url` of one that is not ours and already runs.

    A server that is not ours is told nothing of objectives.
    """

    name: str
    flags: tuple[str, ...] = ()
    url: str | None = None

    @property
    def ours(self) -> bool:
        return self.url is None

    @property
    def identity(self) -> str:
        """What its results are kept under: other flags, other results."""
        return f"{self.name}={self.url or shlex.join(self.flags)}"

    def workers(self) -> list[str]:
        """Names that the workers of a server of ours have."""
        counts = dict.fromkeys(FLEET_ROLES, 0)
        for flag, value in zip(self.flags, self.flags[1:], strict=False):
            if flag.removeprefix("--") in counts:
                counts[flag.removeprefix("--")] = int(value)
        return [f"{role}-{number}" for role, count in counts.items() for number in range(count)]


def parse_fleet(text: str) -> tuple[str, tuple[str, ...]]:
    """`[NAME:]mixed=1,prefill=1,decode=1` as a name and flags. Raises ValueError."""
    name, colon, parts = text.rpartition(":")
    flags: list[str] = []
    for part in parts.split(","):
        role, equals, count = part.partition("=")
        if role not in FLEET_ROLES or not equals or not count.isdecimal() or int(count) < 1:
            raise ValueError(f"--fleet {text}: write it as mixed=2 or NAME:mixed=1,prefill=1,decode=1")
        flags += [f"--{role}", count]
    return (name if colon else parts), tuple(flags)


def parse_contender(text: str) -> Contender:
    """`NAME=FLAGS` of a server of ours. Raises ValueError."""
    name, equals, flags = text.partition("=")
    if not equals or not name or name.startswith("-"):
        raise ValueError(f"--contender {text}: write it as NAME='--mixed 2 --routing-policy goodput'")
    return Contender(name=name, flags=tuple(shlex.split(flags)))


def parse_peer(text: str) -> Contender:
    """`NAME=URL` of a server that runs. Raises ValueError."""
    name, equals, url = text.partition("=")
    if not equals or not name or "//" in name:
        raise ValueError(f"--url {text}: write it as NAME=URL")
    return Contender(name=name, url=url)


def of_policies(policies: Sequence[str], fleets: Sequence[tuple[str, tuple[str, ...]]]) -> list[Contender]:
    """Every policy on every fleet, the policies of one fleet after another."""
    found = []
    for fleet, flags in fleets:
        for policy in policies:
            parts = [policy] if len(policies) > 1 or len(fleets) == 1 else []
            parts += [fleet] if len(fleets) > 1 else []
            found.append(Contender(name="@".join(parts), flags=(*flags, "--routing-policy", policy)))
    return found


def _variant(name: str, *more: str, policy: str = "goodput", fleet: Sequence[str] = ("--mixed", "2")) -> Contender:
    return Contender(name=name, flags=(*fleet, "--routing-policy", policy, *more))


def _fixed(budget: int) -> Contender:
    return _variant(f"fixed {budget}", "--chunking", "fixed", "--max-num-batched-tokens", str(budget))


SPLIT = ("--prefill", "1", "--decode", "1")
PRESETS: Mapping[str, tuple[Contender, ...]] = {
    "policies": tuple(_variant(policy, policy=policy) for policy in POLICIES),
    "modes": (
        _variant("auto", fleet=("--mixed", "1", *SPLIT)),
        _variant("always mixed"),
        _variant("always split", fleet=SPLIT),
    ),
    "roles": (
        _variant("auto", fleet=("--mixed", "2", "--prefill", "1")),
        _variant("always mixed", fleet=("--mixed", "3")),
        _variant("always split", fleet=("--prefill", "2", "--decode", "1")),
    ),
    "chunks": (_variant("slack"), *(_fixed(budget) for budget in CHUNKS)),
    "ablation": (
        _variant("everything"),
        _variant("no score", policy="prefix_aware"),
        _variant("no affinity", "--prefix-index-memory", "1"),
        _variant("no slack order", "--prefill-order", "fcfs"),
        _variant("no slack chunks", "--chunking", "fixed"),
        _variant("no drafts", "--num-speculative-tokens", "0"),
        _variant("no shedding", "--service-classes", NO_SHEDDING),
    ),
}
"""Comparisons by name; of the ablation, each but the first lacks one thing that the first has."""
