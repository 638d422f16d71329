"""What is served and simulated alike: deployments, runs, and requests as both sides take them.

Pure: it starts nothing and sends nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.mixture import Mixture, TimedAsk
from bench.sse import Outcome
from bench.workload import PIECE_RANGE


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWorkers:
    """What is served and simulated: `flags` of `millrace serve`, and its workers' roles; one worker of each."""

    name: str
    flags: tuple[str, ...]
    roles: tuple[str, ...]

    @property
    def workers(self) -> str:
        """As `millrace simulate` takes them."""
        return ",".join(f"{role}=1" for role in self.roles)


DEPLOYMENTS: Mapping[str, ServedWorkers] = {
    made.name: made
    for made in (
        ServedWorkers(name="embedded", flags=(), roles=("mixed",)),
        ServedWorkers(name="split", flags=("--prefill", "1", "--decode", "1"), roles=("prefill", "decode")),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """One run: a deployment under a workload at a share of the rate that a closed loop of six gave."""

    deployment: ServedWorkers
    mixture: Mixture
    share: float

    @property
    def key(self) -> str:
        return f"{self.deployment.name}, {self.mixture.name}, {self.share:g}"


def noise_of(learned: Mapping[str, Any]) -> float:
    """Of a step's logarithm: what the workers' own fits leave, in the mean of the roles."""
    errors = [profile["cost"]["error"] for profile in learned["profiles"].values()]
    return float(sum(errors) / len(errors))


def told_of(learned: Mapping[str, Any]) -> str:
    """What the simulator is given, in a line."""
    costs = [_told_cost(role, profile["cost"]) for role, profile in learned["profiles"].items()]
    capacity = ", ".join(f"{name} {rate:.2f}" for name, rate in learned["capacity"].items())
    front = f"front {learned['front_ms']:.1f} ms, end of a handoff {learned['commit_ms']:.1f} ms"
    return f"{'; '.join(costs)}; {front}; closed loop of six, req/s: {capacity}"


def _told_cost(role: str, cost: Mapping[str, float]) -> str:
    return (
        f"{role} {1e3 * cost['fixed']:.2f} ms a step, {1e3 * cost['token']:.3f} a token, {1e3 * cost['sequence']:.3f} a"
        f" sequence, {1e9 * cost['pair']:.0f} ns a pair, {1e9 * cost['context']:.0f} a token of context,"
        f" ±{cost['error']:.0%}"
    )


def salted(timed: Sequence[TimedAsk], salt: str) -> list[TimedAsk]:
    """The same with other tokens: what is shared within a run is shared with no other, and nothing is cached yet."""
    mask = zlib.crc32(salt.encode()) % PIECE_RANGE
    return [replace(one, ask=replace(one.ask, pieces=tuple(piece ^ mask for piece in one.ask.pieces))) for one in timed]


def row_of(asked: TimedAsk, outcome: Outcome) -> dict[str, Any]:
    """A request as `millrace simulate --trace` reads it, with what was measured of it."""
    kind, good = asked.kind, outcome.error is None
    prefix = asked.ask.pieces[: kind.prefix_tokens]
    tpot = outcome.tpot if good else None
    return {
        "arrival_s": asked.at,
        "prompt_tokens": asked.ask.prompt_tokens,
        "output_tokens": asked.ask.output_tokens,
        "service_class": kind.service_class or "standard",
        "ttft_slo_ms": kind.slo.ttft_ms,
        "tpot_slo_ms": kind.slo.tpot_ms,
        "prefix": f"{zlib.crc32(repr(prefix).encode()):08x}" if prefix else None,
        "prefix_tokens": len(prefix) or None,
        "ttft_ms": 1e3 * outcome.ttft if good else None,
        "tpot_ms": None if tpot is None else 1e3 * tpot,
        "error": outcome.error,
    }
