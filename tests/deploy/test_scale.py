"""When `millrace scale` has its answer."""

from __future__ import annotations

import pytest

from deploy.on_ray.actors import Deployed
from deploy.scale import is_answered

RUNNING, WAITING = {"prefill-0": "running"}, {"prefill-0": "running", "prefill-1": "waiting"}


@pytest.mark.parametrize(
    ("deployed", "answered"),
    [
        (Deployed(counts={}, services=RUNNING, scaled=1, refused="no such group"), False),
        (Deployed(counts={}, services=RUNNING, scaled=1), False),
        (Deployed(counts={}, services=WAITING, scaled=2), False),
        (Deployed(counts={}, services=WAITING, scaled=2, refused="no such group"), True),
        (Deployed(counts={}, services=RUNNING, scaled=2), True),
        (Deployed(counts={}, services=RUNNING, scaled=3), True),
    ],
    ids=["refused before", "taken before", "not there yet", "refused", "there", "a later one"],
)
def test_a_command_is_answered_by_what_is_told_of_it(deployed: Deployed, answered: bool) -> None:
    assert is_answered(deployed, 2) is answered
