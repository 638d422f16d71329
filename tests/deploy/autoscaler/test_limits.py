"""Limits that contradict each other are refused."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.autoscaler.limits import AutoscalerLimits, RoleLimits
from serving.messages import Role


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale_up": 0.4},
        {"scale_up": 1.5},
        {"scale_down": 0.0},
        {"attainment": 0.0},
        {"interval": 0.0},
        {"interval": float("nan")},
        {"interval": 40.0},
        {"cool_down": 30.0},
        {"scale_up_window": 400.0},
        {"roles": {Role.PREFILL: RoleLimits(3), Role.DECODE: RoleLimits(3)}, "most_workers": 5},
    ],
)
def test_limits_that_cannot_be_kept_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        AutoscalerLimits(**wrong)


def test_a_fleet_has_prefill_and_decode_workers_or_mixed_ones() -> None:
    both = {Role.PREFILL: RoleLimits(), Role.DECODE: RoleLimits(), Role.MIXED: RoleLimits(2, 4)}
    AutoscalerLimits(roles=both, most_workers=2)
    with pytest.raises(ValueError, match="more than the most in all"):
        AutoscalerLimits(roles=both, most_workers=1)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3), (-1, 1)])
def test_a_role_has_at_least_one_worker(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RoleLimits(least, most)
