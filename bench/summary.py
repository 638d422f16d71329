"""Figures out of outcomes: throughput, latencies, goodput, errors, and how far the token counts can be believed.

Pure. Names and definitions are those of vLLM's benchmark, so that figures can be held side by side.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.load import Run
from bench.sse import Outcome

Metrics = dict[str, float]  # by name; a figure that cannot be had is absent
LATE_SEND_MS = 20.0  # an open loop later than this is not the load that was asked for
BUSY_CLIENT = 0.7  # of a core: beyond it the client is part of what is measured
LONG_ENOUGH_S = 1.0  # for that share to mean anything
SHORT_OF_COUNT = 0.9  # text that re-tokenizes to less than this share of the tokens claimed


@dataclass(frozen=True, kw_only=True, slots=True)
class SloTargets:
    """Objectives of one request in milliseconds, and the share of requests that must meet both."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float = 0.9

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met(self, outcome: Outcome) -> bool:
        """True if it succeeded within both objectives; a single token has no TPOT to miss."""
        if outcome.error is not None:
            return False
        if self.ttft_ms is not None and outcome.ttft * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or (outcome.tpot or 0.0) * 1e3 <= self.tpot_ms

    def describe(self) -> str:
        parts = [("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)]
        return " and ".join(f"{name} {limit:g} ms" for name, limit in parts if limit is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One measurement in figures. `clean` is false when any request failed or the run did not end by itself."""

    planned: int
    completed: int
    errors: Mapping[str, int] = field(default_factory=dict)  # requests by kind of failure
    examples: Mapping[str, str] = field(default_factory=dict)  # one message for each kind
    stopped: str = ""
    metrics: Metrics = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def clean(self) -> bool:
        return not self.errors and not self.stopped

    def warned(self, warning: str) -> Summary:
        """The same with one more warning; an empty one adds nothing."""
        return replace(self, warnings=(*self.warnings, warning)) if warning else self


def summarize(run: Run, slo: SloTargets) -> Summary:
    """All figures of a run. Latencies are of the requests that succeeded; the failed ones are counted by kind."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    failed = [outcome for outcome in run.outcomes if outcome.error not in (None, "interrupted")]
    metrics = _throughput(run, good, slo) | _latencies(good) | _client(run, good)
    return Summary(
        planned=run.planned,
        completed=len(good),
        errors=dict(Counter(str(outcome.error) for outcome in failed).most_common()),
        examples={str(outcome.error): outcome.detail for outcome in reversed(failed)},
        stopped=run.stopped,
        metrics=metrics,
        warnings=tuple(_warnings(run, good, metrics)),
    )


def _throughput(run: Run, good: Sequence[Outcome], slo: SloTargets) -> Metrics:
    duration = run.duration
    if duration <= 0:
        return {}
    generated = sum(outcome.output_tokens for outcome in good)
    metrics = {
        "duration": duration,
        "total_input_tokens": float(sum(outcome.prompt_tokens for outcome in good)),
        "total_output_tokens": float(generated),
        "request_throughput": len(good) / duration,
        "output_throughput": generated / duration,
        "total_token_throughput": sum(outcome.prompt_tokens + outcome.output_tokens for outcome in good) / duration,
    }
    if slo.given:
        met = sum(map(slo.met, good))
        ended = sum(outcome.error != "interrupted" for outcome in run.outcomes)
        asked = ended if run.stopped == "interrupted" else run.planned  # a hopeless run's rest would count as missed
        metrics |= {"request_goodput": met / duration, "slo_attainment": met / asked if asked else 0.0}
    return metrics


def _latencies(good: Sequence[Outcome]) -> Metrics:
    samples = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.tpot is not None],
        "itl": [gap for outcome in good for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in good],
    }
    return {name: value for kind, values in samples.items() for name, value in spread(kind, values).items()}


def spread(kind: str, seconds: Sequence[float]) -> Metrics:
    """Mean, median, p90 and p99 in milliseconds, percentiles interpolated linearly; nothing of nothing."""
    if not seconds:
        return {}
    milliseconds = np.asarray(seconds) * 1e3
    median, p90, p99 = (float(value) for value in np.percentile(milliseconds, (50, 90, 99)))
    return {
        f"mean_{kind}_ms": float(milliseconds.mean()),
        f"median_{kind}_ms": median,
        f"p90_{kind}_ms": p90,
        f"p99_{kind}_ms": p99,
    }


def _client(run: Run, good: Sequence[Outcome]) -> Metrics:
    """What the client itself cost and how late it was: the measurement's own error."""
    chunks = sum(outcome.chunks for outcome in run.outcomes)
    metrics = {"client_cpu_s": run.client_cpu_s}
    if chunks:
        metrics["client_cpu_us_per_chunk"] = run.client_cpu_s / chunks * 1e6
    if good:
        metrics["tokens_per_chunk"] = sum(o.output_tokens for o in good) / sum(o.chunks for o in good)
        metrics["p99_send_delay_ms"] = float(np.percentile([o.sent - o.scheduled for o in good], 99)) * 1e3
    return metrics


def _warnings(run: Run, good: Sequence[Outcome], metrics: Metrics) -> list[str]:
    warnings = []
    if run.duration > LONG_ENOUGH_S and run.client_cpu_s / run.duration > BUSY_CLIENT:
        warnings.append(f"the client itself used {run.client_cpu_s / run.duration:.0%} of a core: it may be the limit")
    if (late := metrics.get("p99_send_delay_ms", 0.0)) > LATE_SEND_MS:
        warnings.append(f"1 % of the requests left {late:.0f} ms late or more: the client could not keep the rate")
    short = [outcome for outcome in good if outcome.output_tokens < outcome.max_tokens]
    if short:
        warnings.append(f"{len(short)} answers are shorter than asked; the first has {short[0].output_tokens} tokens")
    silent = sum(outcome.reported is None and not outcome.token_ids for outcome in good)
    if silent:
        warnings.append(f"{silent} answers came without usage: one token a chunk is assumed")
    untrue = sum(outcome.reported is not None and outcome.chunks > outcome.reported for outcome in good)
    if untrue:
        warnings.append(f"{untrue} answers came in more chunks than their usage has tokens")
    differing = sum(o.reported is not None and o.token_ids not in (0, o.reported) for o in good)
    if differing:
        warnings.append(f"{differing} answers report another number of tokens than the ids they sent")
    if (merged := metrics.get("tokens_per_chunk", 1.0)) > 1.05:
        warnings.append(f"a chunk carries {merged:.2f} tokens on average: ITL is the time between chunks")
    return warnings


def recount_warning(claimed: Sequence[int], recounted: Sequence[int]) -> str:
    """What to say when texts re-tokenize to clearly fewer tokens than were claimed for them; nothing otherwise.

    Text does not always tokenize back to the ids that made it, and empty tokens leave no text, so a tenth is allowed.
    """
    if sum(recounted) >= SHORT_OF_COUNT * sum(claimed):
        return ""
    counts = f"re-tokenizes to {sum(recounted)} tokens where {sum(claimed)} were counted"
    return f"the text of {len(claimed)} answers {counts}: special tokens leave no text, or some are missing"


def median_metrics(summaries: Sequence[Summary]) -> Metrics:
    """The median over rounds of every figure. Rounds with errors count only when there is no clean one."""
    counted = [summary for summary in summaries if summary.clean] or list(summaries)
    names = dict.fromkeys(name for summary in counted for name in summary.metrics)
    return {
        name: statistics.median(summary.metrics[name] for summary in counted if name in summary.metrics)
        for name in names
    }


def ratios(metrics: Metrics, baseline: Metrics) -> Metrics:
    """Every figure as a multiple of the baseline's; figures the baseline lacks or has as zero are left out."""
    return {name: value / baseline[name] for name, value in metrics.items() if baseline.get(name)}
