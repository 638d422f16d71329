"""Whether traffic is no longer what it was: its rate, its prompts or its outputs have changed by half or more.

Pure. It is told in the log beside what is wanted now; the loads themselves are computed anew from every observation.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.autoscaler.demand import TrafficProfile, traffic_profile
from deploy.autoscaler.observation import Observation, merged

SHIFT = 1.5  # times as much as before, or as little
ENOUGH = 20  # requests before and after, to tell by


def profile_shift(observations: Sequence[Observation], window: float) -> str:
    """What the last `window` seconds have that the time before them had not; empty: nothing of note."""
    begin = observations[-1].at - window
    before, after = (
        [each for each in observations if each.at <= begin],
        [each for each in observations if each.at > begin],
    )
    if not before or not after or min(_answered(before), _answered(after)) < ENOUGH:
        return ""
    was, now = traffic_profile(merged(before)), traffic_profile(merged(after))
    changes = zip(_figures(was), _figures(now), strict=True)
    told = [f"{name} {old:.3g} → {new:.3g}" for (name, old), (_, new) in changes if _differ(old, new)]
    return ", ".join(told)


def _answered(observations: Sequence[Observation]) -> int:
    return sum(each.offered.answered for each in observations)


def _figures(profile: TrafficProfile) -> list[tuple[str, float]]:
    return [("requests/s", profile.rate), ("prompt tokens", profile.prompt), ("output tokens", profile.output or 0.0)]


def _differ(old: float, new: float) -> bool:
    return max(old, new) >= SHIFT * min(old, new) and max(old, new) > 0
