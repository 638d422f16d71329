"""What a step brings out for one sequence, on its way from the engine's thread to whoever waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from serving.engine.sequence import Sequence
from serving.errors import MillraceError
from serving.messages import Delta


@dataclass(frozen=True, slots=True)
class Output:
    """Either new tokens or the error that ended the sequence here. `prefilled` marks the token a prefill drew."""

    seq: Sequence
    delta: Delta | None = None
    error: MillraceError | None = None
    prefilled: bool = False
