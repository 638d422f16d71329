"""Mixtures of kinds of requests, each with lengths, shared prefixes and objectives of its own, drawn from a seed.

Pure. One seed gives the same requests in the same order at every rate, and arrivals that are only stretched; the
tokens that no other request has are fresh for every run, so that no cache answers what it should compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.sse import Outcome
from bench.summary import SloTargets
from bench.workload import PIECE_RANGE, Ask, poisson_arrivals

FEWEST = 12  # requests of a run, however low the rate
TEXTS = 0x7465  # seeds the shared texts, which outlive runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKind:
    """Requests of one kind, `share` of all by weight. Lengths are in tokens, objectives in milliseconds.

    `spread` is the standard deviation of the logarithm of both lengths, 0 for equal ones. The first `prefix_tokens` of
    a prompt are one of `prefix_texts` texts. What follows them is the same tokens `repeats` times.
    """

    name: str
    share: float = 1.0
    prompt_tokens: int = 256
    output_tokens: int = 64
    spread: float = 0.0
    prefix_tokens: int = 0
    prefix_texts: int = 1
    repeats: int = 1
    slo: SloTargets = field(default_factory=SloTargets)
    service_class: str | None = None

    def fields(self) -> dict[str, object]:
        """What the body of such a request says of its objectives."""
        told = {"ttft_slo_ms": self.slo.ttft_ms, "tpot_slo_ms": self.slo.tpot_ms, "service_class": self.service_class}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TimedAsk:
    """A request of this kind, `at` seconds after the first."""

    at: float
    kind: RequestKind
    ask: Ask


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Kinds of requests that come mixed. `flags` are what a server of ours is given for it beside its own."""

    name: str
    kinds: tuple[RequestKind, ...]
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len({kind.name for kind in self.kinds}) < len(self.kinds) or not self.kinds:
            raise ValueError(f"mixture {self.name}: kinds need names of their own")

    def kind(self, name: str) -> RequestKind:
        return next(kind for kind in self.kinds if kind.name == name)

    def met(self, outcome: Outcome) -> bool:
        """True if the request met the objectives of its kind; what failed or was refused has missed them."""
        return self.kind(outcome.kind).slo.met(outcome)

    def scaled(self, factor: float) -> Mixture:
        """The same with every objective multiplied."""
        return replace(self, kinds=tuple(replace(kind, slo=_scaled(kind.slo, factor)) for kind in self.kinds))

    def describe(self) -> str:
        """A line for each table: lengths and objectives by kind."""
        total = sum(kind.share for kind in self.kinds)
        return "; ".join(_described(kind, total) for kind in self.kinds)

    def count(self, rate: float, seconds: float) -> int:
        """Requests of a run of about so many seconds of arrivals."""
        return max(FEWEST, round(rate * seconds))

    def asks(self, count: int, *, seed: int, fresh: Sequence[int] = ()) -> list[tuple[RequestKind, Ask]]:
        """`count` requests. `seed` fixes kinds, lengths and texts; another `fresh` gives other tokens of their own."""
        chosen = np.random.default_rng((seed, 0x4B49)).choice(len(self.kinds), size=count, p=self._shares())
        stretch = np.random.default_rng((seed, 0x4C45)).normal(size=(count, 2))
        groups = np.random.default_rng((seed, 0x4752)).random(count)
        contents = np.random.default_rng((seed, *fresh, 0x434F))
        texts = {kind.name: _texts(kind, index) for index, kind in enumerate(self.kinds)}
        found = []
        for index, (z_prompt, z_output), group in zip(chosen.tolist(), stretch.tolist(), groups.tolist(), strict=True):
            kind = self.kinds[index]
            prompt = max(kind.prefix_tokens + 1, _length(kind.prompt_tokens, kind.spread, z_prompt))
            shared = texts[kind.name][int(group * kind.prefix_texts)] if kind.prefix_tokens else ()
            count = prompt - len(shared)
            once = contents.integers(PIECE_RANGE, size=-(-count // kind.repeats)).tolist()
            own = tuple(once * kind.repeats)[:count]
            output = _length(kind.output_tokens, kind.spread, z_output)
            found.append((kind, Ask(pieces=shared + own, output_tokens=output)))
        return found

    def timed(self, rate: float, count: int, *, seed: int, fresh: Sequence[int] = ()) -> list[TimedAsk]:
        """`count` requests with Poisson arrivals: those of one request a second, stretched to `rate` a second."""
        arrivals = poisson_arrivals(1.0, count, seed)
        asked = self.asks(count, seed=seed, fresh=fresh)
        return [TimedAsk(at / rate, kind, ask) for at, (kind, ask) in zip(arrivals, asked, strict=True)]

    def _shares(self) -> list[float]:
        total = sum(kind.share for kind in self.kinds)
        return [kind.share / total for kind in self.kinds]


def _texts(kind: RequestKind, index: int) -> list[tuple[int, ...]]:
    """The shared texts of a kind: the same in every run and at every seed."""
    contents = np.random.default_rng((TEXTS, index))
    size = (kind.prefix_texts, kind.prefix_tokens)
    return [tuple(text) for text in contents.integers(PIECE_RANGE, size=size).tolist()]


def _length(mean: int, spread: float, z: float) -> int:
    return max(1, round(mean * float(np.exp(spread * z - spread**2 / 2))))


def _scaled(slo: SloTargets, factor: float) -> SloTargets:
    ttft, tpot = (None if limit is None else limit * factor for limit in (slo.ttft_ms, slo.tpot_ms))
    return replace(slo, ttft_ms=ttft, tpot_ms=tpot)


def _described(kind: RequestKind, total: float) -> str:
    shared = f", {kind.prefix_tokens} of them one of {kind.prefix_texts} texts" if kind.prefix_tokens else ""
    goal = f", {kind.slo.describe()}" if kind.slo.given else ""
    return f"{kind.share / total:.0%} {kind.name} {kind.prompt_tokens}/{kind.output_tokens}{shared}{goal}"


INTERACTIVE = RequestKind(
    name="chat", service_class="interactive", spread=0.3, slo=SloTargets(ttft_ms=1000.0, tpot_ms=40.0)
)
MIXTURES: Mapping[str, Mixture] = {
    made.name: made
    for made in (
        Mixture(name="chat", kinds=(INTERACTIVE,)),
        Mixture(
            name="long-mixed",
            kinds=(
                replace(INTERACTIVE, share=0.7, slo=SloTargets(ttft_ms=1000.0, tpot_ms=25.0)),
                RequestKind(
                    name="long",
                    share=0.3,
                    prompt_tokens=1500,
                    output_tokens=32,
                    spread=0.1,
                    slo=SloTargets(ttft_ms=6000.0, tpot_ms=40.0),
                ),
            ),
        ),
        Mixture(
            name="shared-prefix",
            kinds=(
                RequestKind(
                    name="shared",
                    prompt_tokens=1024,
                    output_tokens=32,
                    prefix_tokens=896,
                    prefix_texts=24,
                    service_class="interactive",
                    slo=SloTargets(ttft_ms=2000.0, tpot_ms=40.0),  # a prompt of which nothing is cached takes half
                ),
            ),
            flags=("--num-kv-blocks", "1024"),
        ),
    )
}


def mixture_of(name: str) -> Mixture:
    """Raises ValueError for a name that is not in MIXTURES."""
    if name not in MIXTURES:
        raise ValueError(f"there is no workload {name!r}, but {', '.join(MIXTURES)}")
    return MIXTURES[name]
