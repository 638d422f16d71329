"""What the HTTP API is built with beside its configuration: the served model, and the observer of its requests.

Plain data, made by `deploy` from the program's configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.messages import FinishReason, Pooling

Health = Callable[[], tuple[bool, str]]
"""True if the service can serve, and the reason if it cannot."""

ReadAudit = Callable[[], Awaitable[Mapping[str, Any]]]
"""What all services hold at this moment, as plain data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # None: what the endpoint has


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingForm:
    """How the model's hidden states become an embedding. As vLLM has it where a model says nothing."""

    size: int = 0  # numbers of an embedding; 0: not known
    pooling: Pooling = Pooling.LAST
    normalize: bool = True  # to length 1
    dimensions: tuple[int, ...] | None = None  # what it may be cut to (arXiv 2205.13147): (): anything; None: nothing
    refusal: str = ""  # why the model has no embeddings here; empty where it has


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as the API names it."""

    names: tuple[str, ...]  # what requests may call it; the first is its own name
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # token ids below this are valid
    created: int  # Unix seconds
    fingerprint: str | None = None  # returned as `system_fingerprint`
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: EmbeddingForm = field(default_factory=EmbeddingForm)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("a served model needs at least one name, and no empty one")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must leave room for a prompt token and an output token")


class ApiObserver(Protocol):
    """Is told how each sequence ends for the client.

    Stop strings are found in the API: to the router such a request looks as if the client had left.
    """

    def request_started(self, *, prompt_tokens: int) -> None:
        """A sequence was accepted and its generation is about to be asked for."""

    def request_finished(self, *, finish: FinishReason, completion_tokens: int) -> None:
        """It ended; called exactly once for each `request_started`."""

    def response_finished(self, *, most_tokens: int) -> None:
        """All choices of an answer have ended, the longest with so many tokens."""

    def request_refused(self, *, status: int) -> None:
        """A request, for text or for tokens alone, was answered with an error before it brought any token."""

    def field_ignored(self, name: str) -> None:
        """A body had a field that was ignored: the name of a hint, or `other`."""


class HttpObserver(Protocol):
    """Is told of every answer, with the path of its endpoint, or `none`."""

    def answered(self, *, method: str, handler: str, status: int, seconds: float) -> None:
        """`seconds` from the request's headers to the end of the answer."""


class PlacementLog(Protocol):
    """What the router knows of where requests went, by the id of each sequence, and of its workers; plain data."""

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        """`prefill` and `decode`, the workers' names, and `reason`; `downgrade` where it is less than was asked for.

        `degraded` where it goes on without its objectives.
        """

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        """Everything that is known of a recent request, or of one in progress."""

    def workers(self) -> Mapping[str, Any]:
        """Every worker's state and load, and what became of requests, by class."""


class NoPlacementLog:
    """Knows of nothing."""

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        return None

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        return None

    def workers(self) -> Mapping[str, Any]:
        return {}
