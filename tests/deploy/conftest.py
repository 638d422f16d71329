"""Commands that are parsed and not run, away from the settings of the environment."""

from __future__ import annotations

import os
from typing import Any

import pytest

from deploy import cli
from deploy.runtime.settings import Settings


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MILLRACE_", "VLLM_"))]:
        monkeypatch.delenv(name)


class Started:
    """What a command would have run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.given: dict[str, Any] = {}
        self.settings: Any = None
        monkeypatch.setattr(cli, "_start", self.start)
        monkeypatch.setattr(cli, "setup_logging", lambda *_: None)

    def start(self, given: dict[str, Any], settings: Settings) -> int:
        self.given, self.settings = dict(given), settings
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)
