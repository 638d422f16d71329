"""What an API dialect is: how one endpoint's bodies are read, and how what is generated for them is written.

Generation knows dialects by these protocols alone. A new one is a class here described as `Dialect`, a body, and two
writers; its form of errors joins `ERROR_FORMS` in serving.api.failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from serving.api.choice import Choice, ChoiceDelta
from serving.api.plan import RequestHead, ResponsePlan
from serving.errors import MillraceError
from serving.text.tokenizer import Tokenizer


class WholeWriter(Protocol):
    """Writes an answer that is not streamed."""

    async def add(self, choice: Choice, output: ChoiceDelta) -> None:
        """Keep what a choice has brought; its outputs come in order, those of different choices mixed."""

    def body(self) -> bytes:
        """The JSON of the answer, when all choices have ended."""


class StreamWriter(Protocol):
    """Writes the server-sent events of one stream."""

    def frames(self, choice: Choice, output: ChoiceDelta) -> bytes:
        """The events for one output; empty when it has nothing to show yet."""

    def end(self) -> bytes:
        """What follows the last choice's end."""

    def failed(self, error: MillraceError) -> bytes:
        """What ends a stream that has begun and cannot go on; nothing in it looks like a complete answer."""


class AnswerForm(Protocol):
    """Makes the writers for one request; what an answer repeats of its request, it holds."""

    def whole(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> WholeWriter: ...

    def stream(self, plan: ResponsePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> StreamWriter: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """One request, validated: what to generate, and in which form it is answered."""

    plan: ResponsePlan
    form: AnswerForm


class Dialect(Protocol):
    """One endpoint's API. Safe to use from several threads."""

    @property
    def path(self) -> str:
        """Of the endpoint."""

    @property
    def kind(self) -> type[BaseModel]:
        """Of its bodies, for the OpenAPI document."""

    def prepare(self, body: bytes, head: RequestHead) -> PreparedRequest:
        """Raises `InvalidRequest` or `NotFound`, naming the field as the client knows it."""
