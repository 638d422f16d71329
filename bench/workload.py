"""What is asked and when: lengths, contents and arrival times of the requests of one measurement.

Pure and seeded: the same seed gives the same load to every server. It knows nothing of tokenizers or HTTP; a
prompt is a row of abstract pieces, one a token, that `bench.prompts` turns into ids or words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.lengths import Pair, resampled_pairs, sharegpt_pairs
from bench.replay import TraceLine

PIECE_RANGE = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request to make: its prompt as pieces or as given text or ids, and tokens wanted back."""

    pieces: tuple[int, ...]  # one for each prompt token; empty when `prompt` is given
    output_tokens: int
    prompt: str | tuple[int, ...] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 for a text, whose length only the server knows."""
        return len(self.pieces) if self.prompt is None else 0 if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A kind of load. `kind` is fixed, sharegpt, shared-prefix or trace; the rest belongs to the kinds that use it."""

    kind: str = "fixed"
    input_len: int = 256
    output_len: int = 128
    prefix_share: float = 0.5  # of a shared-prefix prompt, the part that others have too
    prefix_groups: int = 1  # different prefixes
    pairs: tuple[Pair, ...] = ()  # lengths to draw from, in place of the ShareGPT table
    trace: tuple[TraceLine, ...] = ()

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ValueError("--input-len and --output-len must be at least 1")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError("--prefix-share must lie between 0 and 1")
        if self.prefix_groups < 1:
            raise ValueError("--prefix-groups must be at least 1")
        if self.kind == "trace" and not self.trace:
            raise ValueError("--workload trace needs --trace FILE with at least one line")

    def describe(self) -> str:
        """A few words for a table's title."""
        if self.kind == "trace":
            return f"trace of {len(self.trace)} requests"
        if self.kind == "sharegpt":
            return "lengths from a file" if self.pairs else "ShareGPT lengths"
        fixed = f"{self.input_len} in / {self.output_len} out"
        if self.kind == "shared-prefix":
            return f"{fixed}, {self.prefix_share:.0%} of the prompt shared in {self.prefix_groups} group(s)"
        return fixed

    def asks(self, count: int, *, seed: int, fresh: int = 0) -> list[Ask]:
        """`count` requests. `seed` fixes lengths; another `fresh` gives other tokens, so that no cache answers."""
        contents = np.random.default_rng((seed, fresh, 0x434F))
        if self.kind == "trace":
            return [_trace_ask(self.trace[index % len(self.trace)], contents) for index in range(count)]
        if self.kind == "sharegpt":
            pairs = resampled_pairs(self.pairs, count, seed) if self.pairs else sharegpt_pairs(count, seed)
            return [Ask(pieces=_pieces(contents, prompt), output_tokens=output) for prompt, output in pairs]
        shared = round(self.input_len * self.prefix_share) if self.kind == "shared-prefix" else 0
        prefixes = [_pieces(contents, shared) for _ in range(self.prefix_groups)]
        groups = contents.integers(self.prefix_groups, size=count)
        return [
            Ask(pieces=prefixes[group] + _pieces(contents, self.input_len - shared), output_tokens=self.output_len)
            for group in groups
        ]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """`poisson_times` as plain numbers."""
    return poisson_times(rate, count, seed).tolist()  # type: ignore[no-any-return]


def poisson_times(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Seconds of `count` Poisson arrivals, the first at 0 and the last at `(count - 1) / rate`.

    Between two fixed ends, Poisson arrivals are uniform order statistics, which are scaled sums of exponential
    gaps: the process stays Poisson, and the sampling error of the rate itself is gone.
    """
    if rate <= 0:
        raise ValueError("a request rate must be positive")
    times = np.random.default_rng((seed, 0x504F)).exponential(size=count).cumsum()
    if count < 2:
        return np.zeros(count)
    return (times - times[0]) * ((count - 1) / rate / (times[-1] - times[0]))  # type: ignore[no-any-return]


def _trace_ask(line: TraceLine, contents: np.random.Generator) -> Ask:
    pieces = () if line.prompt is not None else _pieces(contents, line.prompt_tokens)
    return Ask(pieces=pieces, output_tokens=line.output_tokens, prompt=line.prompt)


def _pieces(contents: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(contents.integers(PIECE_RANGE, size=count).tolist())
