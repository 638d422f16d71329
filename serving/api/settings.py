"""What the HTTP API is built with: the served model, limits, API keys, and the observer of its requests.

Plain data, made by `deploy` from the program's configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.messages import FinishReason
from serving.service_class import SERVICE_CLASSES, STANDARD, ServiceClass

Health = Callable[[], tuple[bool, str]]
"""True if the service can serve, and the reason if it cannot."""

ReadAudit = Callable[[], Awaitable[Mapping[str, Any]]]
"""What all services hold at this moment, as plain data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as the API names it."""

    names: tuple[str, ...]  # what requests may call it; the first is its own name
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # token ids below this are valid
    created: int  # Unix seconds
    fingerprint: str | None = None  # returned as `system_fingerprint`

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("a served model needs at least one name, and no empty one")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must leave room for a prompt token and an output token")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """Limits of requests, and the API keys."""

    api_keys: tuple[str, ...] = ()  # none: no key is required
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 20.0  # from the first byte of a request to the last of its body
    default_max_tokens: int | None = None  # chat; None is the rest of the context
    default_completion_tokens: int | None = 16  # completions; 16 is what OpenAI's API and vLLM do
    max_logprobs: int = 20
    max_choices: int = 256  # sequences of one HTTP request: prompts times n
    retry_after_s: float = 5.0  # told to clients while draining
    service_classes: Mapping[str, ServiceClass] = field(default_factory=lambda: SERVICE_CLASSES)
    default_service_class: str = STANDARD
    rate_limit_requests: int | None = None  # a minute, for each API key; None: any number
    rate_limit_tokens: int | None = None

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        if min(self.max_body_bytes, self.body_timeout_s, self.max_choices) <= 0:
            raise ValueError("max_body_bytes, body_timeout_s and max_choices must be positive")
        if self.default_service_class not in self.service_classes:
            raise ValueError(f"{self.default_service_class!r} is none of the service classes")


class ApiObserver(Protocol):
    """Is told how each sequence ends for the client.

    Stop strings are found in the API: to the router such a request looks as if the client had left.
    """

    def request_started(self, *, prompt_tokens: int, max_tokens: int) -> None:
        """A sequence was accepted and its generation is about to be asked for."""

    def request_finished(self, *, finish: FinishReason, prompt_tokens: int, completion_tokens: int) -> None:
        """It ended; called exactly once for each `request_started`."""


class PlacementLog(Protocol):
    """What the router knows of where requests went, by the id of each sequence, and of its workers; plain data."""

    def placement(self, request_id: str) -> Mapping[str, str] | None:
        """`prefill` and `decode`, the workers' names, and `reason`; `downgrade` where it is less than was asked for."""

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


class SilentObserver:
    """Counts nothing."""

    def request_started(self, *, prompt_tokens: int, max_tokens: int) -> None: ...

    def request_finished(self, *, finish: FinishReason, prompt_tokens: int, completion_tokens: int) -> None: ...
