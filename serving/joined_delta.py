"""Tokens of several steps that are told together, within one process alone: no wire has a form for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.messages import Delta


@dataclass(kw_only=True, slots=True)
class JoinedDelta(Delta):
    """The tokens of several `steps` together."""

    steps: int = field()
