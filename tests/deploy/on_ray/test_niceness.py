"""Actors are as nice as the router's process: Ray is told so for each of them."""

from __future__ import annotations

import os

import pytest

from deploy.on_ray.library import own_niceness


@pytest.mark.parametrize(("own", "told"), [(0, "0"), (7, "7"), (19, "19"), (-5, "0")])
def test_an_actor_is_told_the_niceness_of_this_process(monkeypatch: pytest.MonkeyPatch, own: int, told: str) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, who: own if (which, who) == (os.PRIO_PROCESS, 0) else 1)
    assert own_niceness() == {"env_vars": {"RAY_worker_niceness": told}}
