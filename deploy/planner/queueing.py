"""The first stage of a search: what a placement attains, by queues of requests in front of workers that take steps.

Pure. It has the profile's step times and the KV's room; it knows no router, lease, prefix, preemption or failure, which
the simulator has (deploy/planner/simulated.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deploy.planner.attainment import Attainment, AttainmentGoal, OfferedRequests, OfferedTraffic, attained, offered
from deploy.planner.costs import StageCosts
from deploy.planner.lanes import NEVER, LaneRules, ServingLane, Waiting
from deploy.planner.placements import CandidatePlacement, InstanceGroup, InstanceShape
from deploy.simulator.profiles import Profile
from serving.messages import Role

UNBOUND = 1 << 40
REFERENCE_DECODE_TOKENS = 50_000  # of context in a decode batch of the reference simulator


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueingRules:
    """What the queues assume.

    `serving`: as our workers do. Steps of a budget of tokens, chunks beside decode steps, KV on its way for as long
    as the link takes. `reference`: as DistServe's simulator does. Whole prompts, as many as the KV holds; vLLM's
    workers compute prompts before any decode step, and never both in one; KV arrives at once; TPOT counts the way
    from the end of the prompt to the last token, over all tokens. `link_bytes_per_second` are a device's.
    """

    reference: bool = False
    kv_bytes: int = 0  # of a token
    layers: int = 1
    link_bytes_per_second: float = NEVER
    message_seconds: float = 1e-3


@dataclass(frozen=True, slots=True)
class QueueingModel:
    """Workers of these profiles, by shape. An AttainmentModel."""

    profiles: tuple[tuple[InstanceShape, Profile], ...]
    rules: QueueingRules

    @property
    def source(self) -> str:
        return "reference" if self.rules.reference else "estimate"

    def attainment(
        self, placement: CandidatePlacement, load: OfferedTraffic, rate: float, seed: int, goal: AttainmentGoal
    ) -> Attainment:
        """One unit at its share of the rate: units are alike."""
        share = rate / placement.units
        run = _QueueingRun(self, offered(load, share, seed), share, goal)
        if placement.split:
            found = run.split(placement.group(Role.PREFILL), placement.group(Role.DECODE), placement.links)
        else:
            found = run.mixed(placement.group(Role.MIXED))
        return replace(found, rate=rate)

    def phase(
        self, group: InstanceGroup, load: OfferedTraffic, rate: float, seed: int, goal: AttainmentGoal
    ) -> Attainment:
        """Prefill or decode workers alone: the other objective counts as met, and prompts of decode workers are there
        when they arrive."""
        run = _QueueingRun(self, offered(load, rate, seed), rate, goal)
        return run.prefill_alone(group) if group.role == Role.PREFILL else run.decode_alone(group)

    def profile(self, shape: InstanceShape) -> Profile:
        return dict(self.profiles)[shape]


class _QueueingRun:
    """One trace at one rate through the lanes of a placement."""

    def __init__(self, model: QueueingModel, requests: OfferedRequests, rate: float, goal: AttainmentGoal):
        self.model, self.rules, self.requests, self.rate, self.goal = model, model.rules, requests, rate, goal
        self.arrived = [at / rate for at in requests.at]
        count = len(self.arrived)
        self.first, self.finish = [NEVER] * count, [NEVER] * count
        self.spare = (1.0 - goal.share) * count + 1e-9
        self.late_first, self.late_rest = set[int](), set[int]()

    def split(self, prefill: InstanceGroup, decode: InstanceGroup, links: int) -> Attainment:
        landed = self._through_prefill(prefill, links)
        return self._given_up() if landed is None or not self._through_decode(decode, landed) else self._result()

    def prefill_alone(self, group: InstanceGroup) -> Attainment:
        if self._through_prefill(group, group.shape.devices) is None:
            return self._given_up()
        self.finish = list(self.first)
        return self._result()

    def decode_alone(self, group: InstanceGroup) -> Attainment:
        self.first = list(self.arrived)
        landed = [(at, number) for number, at in enumerate(self.arrived)]
        return self._result() if self._through_decode(group, landed) else self._given_up()

    def mixed(self, group: InstanceGroup) -> Attainment:
        rules = self._rules(group)
        lanes = self._lanes(group, replace(rules, room=rules.room // group.shape.pp), group.shape.pp, True)
        arrivals = [(at, self._waiting(number)) for number, at in enumerate(self.arrived)]
        return self._result() if self._drive(lanes, arrivals, self._judge) else self._given_up()

    def _through_prefill(self, group: InstanceGroup, links: int) -> list[tuple[float, int]] | None:
        """When and whose KV comes over so many links to decode workers, in order; None where the goal is out of
        reach."""
        rules = replace(self._rules(group), pipelined=group.shape.pp > 1)
        lanes = self._lanes(group, rules, 1, False)
        landed: list[tuple[float, int]] = []
        free = [0.0] * len(lanes)  # each worker's way out

        def judge(lane: int, number: int) -> None:
            free[lane] = self._landing(number, free[lane], links)
            landed.append((free[lane], number))
            self._judge(lane, number)

        arrivals = [(at, self._waiting(number)) for number, at in enumerate(self.arrived)]
        return sorted(landed) if self._drive(lanes, arrivals, judge) else None

    def _landing(self, number: int, free: float, links: int) -> float:
        """KV leaves layer by layer while the prompt is computed, so the last layer's is what is waited for."""
        ended = self.first[number]
        if self.rules.reference:
            return ended
        seconds = self.requests.prompt[number] * self.rules.kv_bytes / (links * self.rules.link_bytes_per_second)
        return max(ended + seconds / self.rules.layers, free + seconds) + self.rules.message_seconds

    def _through_decode(self, group: InstanceGroup, landed: list[tuple[float, int]]) -> bool:
        rules = self._rules(group)
        lanes = self._lanes(group, replace(rules, room=rules.room // group.shape.pp), group.shape.pp, True)
        arrivals = [(at, self._waiting(number, computed=True)) for at, number in landed if not self._over(number)]
        return self._drive(lanes, arrivals, self._judge)

    def _over(self, number: int) -> bool:
        """True of a request whose only token came with its prompt."""
        if self.rules.reference or self.requests.output[number] > 1:
            return False
        self.finish[number] = self.first[number]
        return True

    def _waiting(self, number: int, computed: bool = False) -> Waiting:
        prompt, output = self.requests.prompt[number], self.requests.output[number]
        return Waiting(number, prompt, output + self.rules.reference, prompt if computed else 0)

    def _rules(self, group: InstanceGroup) -> LaneRules:
        room = self.model.profile(group.shape).kv_tokens
        if not self.rules.reference:
            return LaneRules(budget=group.budget or UNBOUND, room=room)
        if group.role == Role.DECODE:
            return LaneRules(budget=UNBOUND, room=UNBOUND, batch_context=REFERENCE_DECODE_TOKENS)
        return LaneRules(
            budget=room, room=UNBOUND if group.role == Role.PREFILL else room, whole=True, prompts_first=True
        )

    def _lanes(self, group: InstanceGroup, rules: LaneRules, batches: int, decodes: bool) -> list[ServingLane]:
        """`batches` of each worker, one for each stage, take turns."""
        stages = group.shape.pp
        costs = StageCosts(self.model.profile(group.shape), stages, free_decode=self.rules.reference)
        return [ServingLane(costs, rules, self.first, self.finish, decodes) for _ in range(group.count * batches)]

    def _drive(
        self, lanes: list[ServingLane], arrivals: list[tuple[float, Waiting]], judge: Callable[[int, int], None]
    ) -> bool:
        """Each request to the lane with the least to do. False once the goal is out of reach."""
        for at, request in [*arrivals, (NEVER, None)]:
            for index, lane in enumerate(lanes):
                lane.advance(at)
                if lane.ended:
                    for number in lane.ended:
                        judge(index, number)
                    lane.ended.clear()
            if self._hopeless():
                return False
            if request is not None:
                min(lanes, key=_load).push(at, request)
        return True

    def _hopeless(self) -> bool:
        if self.goal.joint:
            return len(self.late_first | self.late_rest) > self.spare
        return max(len(self.late_first), len(self.late_rest)) > self.spare

    def _judge(self, lane: int, number: int) -> None:
        """Notes what is late as soon as it is known: where a request leaves a prefill worker, and at its end."""
        if self.first[number] - self.arrived[number] > self.requests.ttft[number]:
            self.late_first.add(number)
        if self._tpot(number) > self.requests.tpot[number]:
            self.late_rest.add(number)

    def _tpot(self, number: int) -> float:
        tokens = self.requests.output[number] - (not self.rules.reference)
        return (self.finish[number] - self.first[number]) / tokens if tokens else 0.0

    def _result(self) -> Attainment:
        numbers = range(len(self.arrived))
        ttfts = [first - at for first, at in zip(self.first, self.arrived, strict=True)]
        return attained(self.rate, ttfts, [self._tpot(number) for number in numbers], self.requests)

    def _given_up(self) -> Attainment:
        count = len(self.arrived)
        return Attainment(
            rate=self.rate,
            offered=count,
            ttft=(count - len(self.late_first)) / count,
            tpot=(count - len(self.late_rest)) / count,
            joint=(count - len(self.late_first | self.late_rest)) / count,
        )


def _load(lane: ServingLane) -> int:
    return lane.load
