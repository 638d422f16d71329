"""What niceness Ray is to give actors: that of the router's process, where that is not negative."""

from __future__ import annotations

import os

import pytest

from deploy.on_ray.library import own_niceness


@pytest.mark.parametrize(("own", "told"), [(0, "0"), (7, "7"), (19, "19"), (-5, "0")])
def test_ray_adds_the_niceness_of_this_process_but_none_below_zero(
    monkeypatch: pytest.MonkeyPatch, own: int, told: str
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, who: own if (which, who) == (os.PRIO_PROCESS, 0) else 1)
    assert own_niceness() == {"env_vars": {"RAY_worker_niceness": told}}
