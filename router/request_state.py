"""One request on its way through the router: what is known of its text, and what its tries have come to.

Plain state; `now` comes in. It knows neither workers nor how they are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.messages import Build, Delta, LeaseId, LeaseOrder, Request
from serving.timeline import Moment, Timeline


@dataclass(slots=True, kw_only=True)
class RequestState:
    """`generated` are the output tokens the client has; `build` is what wrote them, None before a worker is chosen."""

    request: Request
    generated: list[int] = field(default_factory=list)
    build: Build | None = None
    timeline: Timeline = field(default_factory=Timeline)
    last: Delta | None = None
    failures: int = 0  # tries that broke since a worker last decoded for it; planned moves are not counted
    block_keys: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)  # by fingerprint and block size

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.generated]

    @property
    def required_build(self) -> Build | None:
        """What has to go on with the text; None while it has none."""
        return self.build if self.generated else None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finish is not None

    def order(self, fence: LeaseId) -> LeaseOrder:
        return LeaseOrder(lease=fence, request=self.request, generated=tuple(self.generated))

    def take(self, delta: Delta, now: float) -> Delta:
        """The delta has come: its tokens are part of the text from now on."""
        if self.timeline.last_token is None:
            self.timeline.note(Moment.FIRST_TOKEN, now)
        self.timeline.last_token = now
        self.timeline.tokens += len(delta.tokens)
        self.generated += delta.tokens
        self.last = delta
        return delta
