"""Each set of values in turn."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import Manifest
from tests.deploy.helm.manifests import SETS, golden


@pytest.fixture(params=SETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """Those of each set of values."""
    return golden(request.param)
