"""Who asks for what and when: classes of requests with lengths, shared prefixes and objectives, as a seeded trace.

Pure. A trace has the rate of one request a second and is stretched to any other, so that two rates differ in nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.lengths import sharegpt_pairs
from bench.mixture import MIXTURES, Mixture
from bench.workload import poisson_times
from deploy.simulator.profiles import Profile
from deploy.simulator.texts import VOCABULARY
from serving.messages import Request, SamplingParams, Slo
from serving.service_class import SERVICE_CLASSES

Floats = NDArray[np.float64]
Integers = NDArray[np.signedinteger]
ROWS = 4096  # of a trace, made into requests at a time


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, lognormal around a mean; `spread` is the standard deviation of the logarithm, 0 for one length."""

    mean: float
    spread: float = 0.0
    most: int = 1900

    def draw(self, generator: np.random.Generator, count: int) -> Integers:
        drawn = generator.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficClass:
    """Requests of one kind, `share` of all by weight. Without lengths they are those of ShareGPT, prompt and output.

    Objectives in milliseconds, or as multiples of what the profile takes: for a prompt of the mean length alone, and
    for a decode step of one sequence. The first `prefix_tokens` of a prompt are one of `prefix_groups` texts; group
    number k is k**-`prefix_skew` as popular as the first.
    """

    name: str = "standard"
    share: float = 1.0
    prompt: Lengths | None = None
    output: Lengths | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttft_slowdown: float = 5.0
    tpot_slowdown: float = 3.0
    priority: int = 0
    prefix_tokens: int = 0
    prefix_groups: int = 1
    prefix_skew: float = 0.0

    def objectives(self, profile: Profile) -> Slo:
        prompt = int(self.prompt.mean) if self.prompt is not None else 512
        ttft = self.ttft_slowdown * profile.prompt_seconds(prompt) * 1e3 if self.ttft_ms is None else self.ttft_ms
        tpot = self.tpot_slowdown * profile.decode_seconds(1, prompt) * 1e3 if self.tpot_ms is None else self.tpot_ms
        return Slo(ttft_ms=ttft, tpot_ms=tpot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """`burstiness` is the coefficient of variation of the gaps between arrivals: 1 is Poisson, more is burstier."""

    name: str
    classes: tuple[TrafficClass, ...]
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.burstiness <= 0:
            raise ValueError("--burstiness must be positive")

    def with_objectives(self, ttft_ms: float | None, tpot_ms: float | None) -> Traffic:
        """The same with these objectives for every class, where they are given."""
        given = [
            replace(
                kind,
                ttft_ms=kind.ttft_ms if ttft_ms is None else ttft_ms,
                tpot_ms=kind.tpot_ms if tpot_ms is None else tpot_ms,
            )
            for kind in self.classes
        ]
        return replace(self, classes=tuple(given))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: `at` seconds after the first at one request a second, `output_tokens` until its EOS.

    One that is not `counted` is left out of every figure.
    """

    at: float
    request: Request
    output_tokens: int
    counted: bool = True


def of_mixture(mixture: Mixture) -> Traffic:
    """What `bench.policies` sends to real processes, with its objectives in milliseconds."""
    kinds = [
        TrafficClass(
            name=kind.service_class or "standard",
            share=kind.share,
            prompt=Lengths(kind.prompt_tokens, kind.spread),
            output=Lengths(kind.output_tokens, kind.spread),
            ttft_ms=kind.slo.ttft_ms,
            tpot_ms=kind.slo.tpot_ms,
            priority=SERVICE_CLASSES[kind.service_class or "standard"].priority,
            prefix_tokens=kind.prefix_tokens,
            prefix_groups=kind.prefix_texts,
        )
        for kind in mixture.kinds
    ]
    return Traffic(name=f"bench-{mixture.name}", classes=tuple(kinds))


CHAT = TrafficClass(name="interactive", prompt=Lengths(256, 0.6), output=Lengths(64, 0.6, most=512))
TRAFFIC: dict[str, Traffic] = {
    made.name: made
    for made in (
        Traffic(name="chat", classes=(CHAT,)),
        Traffic(
            name="long-mixed",
            classes=(
                replace(CHAT, share=0.7, tpot_slowdown=2.0),
                TrafficClass(share=0.3, prompt=Lengths(1500, 0.1), output=Lengths(32, 0.3), tpot_slowdown=2.0),
            ),
        ),
        Traffic(
            name="shared-prefix",
            classes=(replace(CHAT, prompt=Lengths(1024, 0.1), prefix_tokens=896, prefix_groups=64, prefix_skew=1.0),),
        ),
        Traffic(name="sharegpt", classes=(TrafficClass(ttft_ms=250.0, tpot_ms=100.0),)),
        *map(of_mixture, MIXTURES.values()),
    )
}


def traffic_of(name: str) -> Traffic:
    """Raises ValueError for a name that is not in TRAFFIC."""
    if name not in TRAFFIC:
        raise ValueError(f"there is no workload {name!r}, but {', '.join(TRAFFIC)}")
    return TRAFFIC[name]


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request of a trace without its text: `kind` is the number of its class."""

    at: float
    kind: int
    prompt: int
    output: int


class DrawnTrace:
    """The requests of a trace as columns, 20 bytes each; going through it gives them as DrawnRequest, one by one."""

    def __init__(self, at: Floats, kind: Integers, prompt: Integers, output: Integers):
        self.at = at
        self.kind = kind.astype(np.int32)
        self.prompt = prompt.astype(np.int32)
        self.output = output.astype(np.int32)

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[DrawnRequest]:
        for first in range(0, len(self), ROWS):
            rows = slice(first, first + ROWS)
            columns = (column[rows].tolist() for column in (self.at, self.kind, self.prompt, self.output))
            yield from map(DrawnRequest, *columns)


def drawn(traffic: Traffic, profile: Profile, count: int, seed: int) -> DrawnTrace:
    """The requests of `trace` with the same arguments: arrivals, classes and lengths, at one a second."""
    return _drawn(traffic, profile, count, seed, np.random.default_rng((seed, 0x5452)))


def _drawn(traffic: Traffic, profile: Profile, count: int, seed: int, generator: np.random.Generator) -> DrawnTrace:
    shares = np.array([kind.share for kind in traffic.classes])
    kinds = generator.choice(len(shares), size=count, p=shares / shares.sum())
    pairs = np.empty((count, 2), dtype=np.int64)
    for number, kind in enumerate(traffic.classes):
        of_kind = _pairs(kind, generator, count, seed)
        pairs[kinds == number] = of_kind[kinds == number]
    prompt = np.minimum(pairs[:, 0], profile.max_model_len - 2)
    output = np.minimum(pairs[:, 1], profile.max_model_len - 1 - prompt)
    return DrawnTrace(arrival_times(count, traffic.burstiness, seed), kinds, prompt, output)


@lru_cache(maxsize=16)
def trace(
    traffic: Traffic, profile: Profile, count: int, seed: int, *, max_tokens: int | None = None
) -> tuple[Arrival, ...]:
    """All of `arriving` at once, for short traces that are played again and again."""
    return tuple(arriving(traffic, profile, count, seed, max_tokens=max_tokens))


def arriving(
    traffic: Traffic, profile: Profile, count: int, seed: int, *, max_tokens: int | None = None
) -> Iterator[Arrival]:
    """`count` requests at one a second, one by one. The same arguments give the same trace.

    Clients ask for `max_tokens`, or for just the tokens that there will be.
    """
    generator = np.random.default_rng((seed, 0x5452))
    requests = _drawn(traffic, profile, count, seed, generator)
    prefixes = [_prefixes(kind, generator) for kind in traffic.classes]
    groups = [_groups(kind) for kind in traffic.classes]
    slos = [kind.objectives(profile) for kind in traffic.classes]
    for number, each in enumerate(requests):
        chosen, output = traffic.classes[each.kind], each.output
        drawn_group, starts = generator.random(), prefixes[each.kind]
        group = int(groups[each.kind].searchsorted(drawn_group, side="right")) if len(starts) > 1 else 0
        start = starts[group][: each.prompt]
        asked = max(output, max_tokens) if max_tokens is not None else output
        request = Request(
            request_id=f"{seed}-{number}",
            prompt=start + _tokens(generator, each.prompt - len(start)),
            sampling=SamplingParams(max_tokens=asked, seed=int(generator.integers(1 << 32)), temperature=0.0),
            slo=slos[each.kind],
            service_class=chosen.name,
            priority=chosen.priority,
        )
        yield Arrival(each.at, request, output)


def arrivals(count: int, burstiness: float, seed: int) -> list[float]:
    """`arrival_times` as plain numbers."""
    return arrival_times(count, burstiness, seed).tolist()  # type: ignore[no-any-return]


def arrival_times(count: int, burstiness: float, seed: int) -> Floats:
    """Seconds of `count` arrivals, the first at 0 and the last at `count - 1`. Gaps are gamma distributed."""
    if burstiness == 1.0 or count < 2:
        return poisson_times(1.0, count, seed)
    gaps = np.random.default_rng((seed, 0x4255)).gamma(burstiness**-2, size=count - 1)
    times = np.concatenate(([0.0], gaps.cumsum()))
    return times * ((count - 1) / times[-1])  # type: ignore[no-any-return]


def _pairs(kind: TrafficClass, generator: np.random.Generator, count: int, seed: int) -> Integers:
    """Prompt and output tokens [count, 2]."""
    if kind.prompt is None or kind.output is None:
        return np.array(sharegpt_pairs(count, seed), dtype=np.int64).reshape(count, 2)
    return np.stack([kind.prompt.draw(generator, count), kind.output.draw(generator, count)], axis=1)


def _prefixes(kind: TrafficClass, generator: np.random.Generator) -> list[tuple[int, ...]]:
    return [_tokens(generator, kind.prefix_tokens) for _ in range(kind.prefix_groups)]


def _groups(kind: TrafficClass) -> Floats:
    """The popularity of its prefixes, summed up: where a draw between 0 and 1 falls is a request's."""
    weights = np.arange(1, kind.prefix_groups + 1) ** -kind.prefix_skew
    sums = (weights / weights.sum()).cumsum()
    return sums / sums[-1]  # type: ignore[no-any-return]


def _tokens(generator: np.random.Generator, count: int) -> tuple[int, ...]:
    """Numbers that all requests share: those of one under way would take more memory than all else of it."""
    return tuple(map(_NUMBERS.__getitem__, generator.integers(1, VOCABULARY, size=count).tolist()))


_NUMBERS = tuple(range(VOCABULARY))
