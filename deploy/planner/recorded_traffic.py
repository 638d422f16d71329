"""Traffic as a trace file has it: its lengths in their order, how bursty its arrivals are, and its objectives.

It reads one file; what is planned with it is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploy.simulator.trace_files import LEAST_SPAN, TracedRequest, read_trace
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass

MOST_PAIRS = 50_000  # of lengths that are kept: of a longer trace as many, evenly
LEAST_BURSTINESS, MOST_BURSTINESS = 0.1, 10.0  # nearer to regular, or burstier, makes no difference to a plan
FEWEST_GAPS = 20  # that say something of how bursty arrivals are


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTraffic:
    """`pairs` of prompt and output tokens in the order of arrival. Shared prefixes are left out: a plan has none."""

    traffic: Traffic
    pairs: tuple[tuple[int, int], ...]

    @staticmethod
    def read(path: Path, *, objectives: bool) -> RecordedTraffic:
        """Of the requests that are counted; with `objectives` those that they bring, which must be alike.

        Raises ValueError that names the file; OSError.
        """
        requests = [each for each in read_trace(path) if each.counted]
        ttft, tpot = _objectives(path, requests) if objectives else (None, None)
        prompt, output = (
            float(np.mean([getattr(each, f"{which}_tokens") for each in requests])) for which in ("prompt", "output")
        )
        kind = TrafficClass(prompt=Lengths(prompt), output=Lengths(output), ttft_ms=ttft, tpot_ms=tpot)
        every = -(-len(requests) // MOST_PAIRS)
        return RecordedTraffic(
            traffic=Traffic(name=path.name, classes=(kind,), burstiness=burstiness(requests)),
            pairs=tuple((each.prompt_tokens, each.output_tokens) for each in requests[::every]),
        )


def burstiness(requests: Sequence[TracedRequest]) -> float:
    """The coefficient of variation of the gaps between arrivals; 1, as of Poisson, where there are few."""
    gaps = np.diff([each.arrival_s for each in requests])
    if len(gaps) < FEWEST_GAPS or not gaps.sum() >= LEAST_SPAN:
        return 1.0
    return min(MOST_BURSTINESS, max(LEAST_BURSTINESS, float(gaps.std() / gaps.mean())))


def _objectives(path: Path, requests: Sequence[TracedRequest]) -> tuple[float | None, float | None]:
    """TTFT and TPOT in milliseconds, None where no request brings one."""
    found = []
    for name, flag in (("ttft_slo_ms", "--ttft-ms"), ("tpot_slo_ms", "--tpot-ms")):
        known = {None if math.isnan(value) else value for value in (getattr(each, name) for each in requests)}
        if len(known) > 1:
            raise ValueError(f"{path}: requests differ in {name}, and a plan is for one objective: give {flag}")
        found.append(known.pop())
    return found[0], found[1]
