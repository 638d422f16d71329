"""What the HTTP API is built with: the served model, limits, API keys, and the observer of its requests.

Plain data, made by `deploy` from the program's configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from serving.messages import FinishReason

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

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        if min(self.max_body_bytes, self.body_timeout_s, self.max_choices) <= 0:
            raise ValueError("max_body_bytes, body_timeout_s and max_choices must be positive")


class ApiObserver(Protocol):
    """Is told how each sequence ends for the client.

    Stop strings are found in the API: to the router such a request looks as if the client had left.
    """

    def request_started(self, *, prompt_tokens: int, max_tokens: int) -> None:
        """A sequence was accepted and its generation is about to be asked for."""

    def request_finished(self, *, finish: FinishReason, prompt_tokens: int, completion_tokens: int) -> None:
        """It ended; called exactly once for each `request_started`."""


class SilentObserver:
    """Counts nothing."""

    def request_started(self, *, prompt_tokens: int, max_tokens: int) -> None: ...

    def request_finished(self, *, finish: FinishReason, prompt_tokens: int, completion_tokens: int) -> None: ...
