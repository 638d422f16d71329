"""Traffic that turns from long prompts to long answers: how much of it fits which fleet, and what came of it.

Pure: a step cost in, loads out; outcomes in, shares, tables and a picture out. Who sends and who scales is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.mixture import RequestKind
from bench.plot import Panel, sheet
from bench.standings import table
from bench.summary import SloTargets
from bench.surge import Arrived, LoadSpan, bounds, figures
from serving.step_cost import StepCost

# A step of one long prompt takes 0.9 s; so long may a short one have to wait, whatever the order.
PACE = StepCost(fixed=0.018, token=1.7e-3, pair=4e-7, sequence=2e-4, context=2e-6)
PROMPTS = RequestKind(
    name="long prompts", prompt_tokens=512, output_tokens=12, spread=0.2, slo=SloTargets(ttft_ms=6000, tpot_ms=90)
)
ANSWERS = RequestKind(
    name="long answers", prompt_tokens=48, output_tokens=160, spread=0.2, slo=SloTargets(ttft_ms=4000, tpot_ms=60)
)
KINDS = (PROMPTS, ANSWERS)
STEP_TOKENS = 512
FIRST_SHARE = 0.3  # of the time, for the first phase
RARELY = 0.1  # of what one worker does, so much of the other kind comes along
SHIFT_SECONDS = 30.0  # after the shift, before what was done about it can show
ATTAINED = 0.9
BIN = 6.0  # seconds of arrivals, for a point of a curve
AUTOSCALED, FIXED, RIGHT = "with the autoscaler", "as it was", "right roles from the start"


@dataclass(kw_only=True, slots=True)
class ShiftedTraffic:
    """What came of all requests of one run, and how many workers of each role served, by second of the run.

    `begins` is the second of the whole traffic at which it began.
    """

    name: str
    spans: Sequence[LoadSpan]
    begins: float = 0.0
    arrived: list[Arrived] = field(default_factory=list)
    roles: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    flips: int = 0

    def attained(self, first: float, end: float) -> float | None:
        """The share of requests of these seconds of its own that met both objectives; None: there were none."""
        own = [one.outcome for one in self.arrived if first <= one.at < end]
        goals = {kind.name: kind.slo for kind in KINDS}
        return sum(goals[each.kind].met(each) for each in own) / len(own) if own else None

    @property
    def refused(self) -> int:
        return sum(each.refused for each in figures(self.arrived, KINDS, self.spans))

    @property
    def failed(self) -> int:
        """Neither answered nor refused."""
        return sum(one.outcome.error is not None for one in self.arrived) - self.refused


def prompts_a_second(kind: RequestKind) -> float:
    """That one prefill worker computes, by PACE."""
    return 1 / PACE.prompt_seconds(0, kind.prompt_tokens, STEP_TOKENS)


def answers_a_second(kind: RequestKind) -> float:
    """That one decode worker gives in the largest batch that keeps the kind's TPOT, by PACE."""
    assert kind.slo.tpot_ms is not None, "the kind has a TPOT"
    tpot, context = kind.slo.tpot_ms / 1e3, kind.prompt_tokens + kind.output_tokens / 2
    each = PACE.token + PACE.sequence + (PACE.pair + PACE.context) * context
    return (tpot - PACE.fixed) / each / tpot / kind.output_tokens


def phases(seconds: float, fleet: Mapping[str, int], load: float) -> list[LoadSpan]:
    """Long prompts at `load` of the fleet's prefill workers; then long answers at that of one decode worker more."""
    first = load * fleet["prefill"] * prompts_a_second(PROMPTS)
    second = load * (fleet["decode"] + 1) * answers_a_second(ANSWERS)
    rare = RARELY * answers_a_second(ANSWERS), RARELY * prompts_a_second(PROMPTS)
    before, after = FIRST_SHARE * seconds, (1 - FIRST_SHARE) * seconds
    return [
        LoadSpan(name=PROMPTS.name, seconds=before, rates={PROMPTS.name: first, ANSWERS.name: rare[0]}),
        LoadSpan(name=ANSWERS.name, seconds=after, rates={PROMPTS.name: rare[1], ANSWERS.name: second}),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftVerdict:
    """Shares attained before the shift, just after it and in its last third, of each run that had them."""

    before: Mapping[str, float | None]
    just_after: Mapping[str, float | None]
    at_the_end: Mapping[str, float | None]
    failed: int
    flips: int

    @property
    def complaints(self) -> list[str]:
        """Why the runs do not show a recovery; empty where they do."""
        ends, before = self.at_the_end, self.before.get(AUTOSCALED) or 0.0
        right, fixed, scaled = (ends.get(name) for name in (RIGHT, FIXED, AUTOSCALED))
        found = [] if before >= ATTAINED else [f"{before:.0%} attained before the shift: the load is too high"]
        if self.failed:
            found.append(f"{self.failed} requests failed")
        if right is not None and right < ATTAINED:
            found.append(f"{right:.0%} attained with the right roles from the start: the load is too high")
        if fixed is not None and fixed >= ATTAINED:
            found.append(f"{fixed:.0%} attained without a flip: the load is too low to need one")
        if AUTOSCALED in ends and not self.flips:
            found.append("no worker flipped")
        if scaled is not None and scaled < min(ATTAINED, right if right is not None else ATTAINED):
            found.append(f"{scaled:.0%} attained at the end, after the flip")
        return found


def verdict(runs: Sequence[ShiftedTraffic]) -> ShiftVerdict:
    before, soon, late = {}, {}, {}
    for run in runs:
        whole = bounds(run.spans)
        _, shift, last = whole[-1]
        before[run.name] = run.attained(0.0, shift) if len(whole) > 1 else None
        soon[run.name] = run.attained(shift, shift + SHIFT_SECONDS)
        late[run.name] = run.attained(last - (last - shift) / 3, last)
    flips = next((run.flips for run in runs if run.name == AUTOSCALED), 0)
    return ShiftVerdict(
        before=before, just_after=soon, at_the_end=late, failed=sum(run.failed for run in runs), flips=flips
    )


def markdown(runs: Sequence[ShiftedTraffic], title: str) -> str:
    """What the runs attained, side by side, and what became of each kind in each phase."""
    found = verdict(runs)
    shares = [found.before, found.just_after, found.at_the_end]
    counts = {run.name: (len(run.arrived), run.refused, run.failed, run.flips) for run in runs}
    rows = [[run.name, *(_percent(each[run.name]) for each in shares), *map(str, counts[run.name])] for run in runs]
    heads = ["run", "before", f"{SHIFT_SECONDS:.0f} s after the shift", "last third"]
    first = table([*heads, "offered", "refused", "failed", "flips"], rows)
    second = table(
        ["run", "kind", "phase", "offered/s", "offered", "attained", "TTFT p50 / p90, ms", "TPOT p50 / p90, ms"],
        [row for run in runs for row in _kinds(run)],
    )
    goals = "; ".join(f"{kind.name} {kind.prompt_tokens}/{kind.output_tokens}, {kind.slo.describe()}" for kind in KINDS)
    told = "; ".join(found.complaints) or "attainment recovers, and no request failed"
    return "\n\n".join([f"{title} Objectives: {goals}.", first, second, f"Verdict: {told}."]) + "\n"


def _kinds(run: ShiftedTraffic) -> list[list[str]]:
    rates = {span.name: span.rates for span in run.spans}
    return [
        [
            *(run.name, one.kind, one.span, f"{rates[one.span][one.kind]:.2f}", str(one.offered)),
            *(f"{one.attainment:.1%}", _middle_and_tail(one.ttft), _middle_and_tail(one.tpot)),
        ]
        for one in figures(run.arrived, KINDS, run.spans)
    ]


def _middle_and_tail(seconds: Sequence[float]) -> str:
    each = sorted(seconds)
    return f"{1e3 * each[len(each) // 2]:.0f} / {1e3 * each[int(0.9 * len(each))]:.0f}" if each else "—"


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.1%}"


def drawing(runs: Sequence[ShiftedTraffic], title: str) -> str:
    """Attainment of each run, and the workers of each role in the one with the autoscaler, over time, as SVG."""
    shift = max(bounds(run.spans)[-1][1] for run in runs)
    attained = {run.name: [(run.begins + at, 100 * share) for at, share in _shares(run)] for run in runs}
    scaled = next((run for run in runs if run.name == AUTOSCALED), runs[0])
    roles = {
        f"{role} workers": [(at, float(counts[role])) for at, counts in scaled.roles] for role in ("prefill", "decode")
    }
    panels = [
        Panel(
            title="requests within both objectives, %", x_label="seconds", curves=attained, limit=90.0, changes=[shift]
        ),
        Panel(title=f"workers that serve, {scaled.name}", x_label="seconds", curves=roles, changes=[shift]),
    ]
    return sheet(title, panels, [*attained, *roles])


def _shares(run: ShiftedTraffic) -> list[tuple[float, float]]:
    """The share attained by the requests of each BIN, by its middle."""
    last = sum(span.seconds for span in run.spans)
    bins = [BIN * number for number in range(int(last / BIN))]
    shares = [(at + BIN / 2, run.attained(at, at + BIN)) for at in bins]
    return [(at, share) for at, share in shares if share is not None]
