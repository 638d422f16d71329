"""Drafts wherever they can be made: whether they pay is another matter."""

from __future__ import annotations

import pytest

from decode.speculation import Speculation, StepPrice


def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a drafted token cost nothing and came with any chance."""
    monkeypatch.setattr(Speculation, "price", lambda self, batch: StepPrice(batch, 0.0, 1.0, 0.0, -1.0))
    monkeypatch.setattr(Speculation, "repays", lambda self, drafts, batch: True)
