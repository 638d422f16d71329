"""What one HTTP request asks for, once validated: the sequences to generate and how to show them.

Plain data between preparing, generating and rendering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.api.fields import IgnoredFields
from serving.api.resumption import KEY, EventMark, repeated_name
from serving.messages import Request, owned
from serving.text.reasoning import ReasoningForm
from serving.text.tools.forms import ToolForm


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestIds:
    """Of one HTTP request: `shown` in headers, `unique` in response ids even where a client repeats its own."""

    shown: str
    unique: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """What requests with an API key may be; by default anything, and of no tenant."""

    owner: str = ""  # whose cached prefixes they share: a tenant's or a group's, as a digest; empty: all clients'
    classes: tuple[str, ...] = ()  # service classes; none: all
    priority: int | None = None  # the most urgent, smaller goes first; None: any
    operator: bool = True  # may read what concerns all tenants

    def within(self, name: str) -> str:
        """A name that clients choose, such as a cache_salt, told apart from other tenants' same ones."""
        return owned(self.owner, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestHead:
    """What an HTTP request says beside its body."""

    ids: RequestIds
    key: str = ""  # tells API keys apart, without showing them; empty where none is required
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    arrived: float = 0.0  # seconds on the router's clock
    rights: Rights = field(default_factory=Rights)

    @property
    def response_name(self) -> str:
        """What the response's id is made of: its own, or that of all requests with the same Idempotency-Key."""
        key = self.headers.get(KEY)
        return self.ids.unique if key is None else repeated_name(key, self.rights.owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceRequest:
    """One sequence to generate; a request with n = 3 and two prompts has six."""

    index: int  # the choice it fills
    prompt_number: int  # which of the request's prompts it continues
    request: Request
    prompt_text: str | None = None  # shown before the output, when the prompt is to be echoed


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What the output follows, and the field that asks for it."""

    grammar: str = ""  # empty: none
    param: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """How tool calls are read from an answer."""

    form: ToolForm
    names: frozenset[str]  # of the request's tools
    many: bool  # more than one call
    shown: frozenset[int]  # special tokens that are part of the form


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingPlan:
    """How thoughts are read from an answer."""

    form: ReasoningForm
    begun: bool  # by the prompt
    special: Mapping[str, int]  # marks of the form that are special tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsePlan:
    """One HTTP request."""

    id: str  # of the response
    created: int  # Unix seconds
    model: str  # the name the client used
    fingerprint: str | None
    sequences: tuple[ChoiceRequest, ...]
    prompt_tokens: int  # of all prompts, each counted once
    stream: bool
    include_usage: bool  # a last chunk with the usage
    continuous_usage: bool  # usage in every chunk
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int
    logprobs: int | None  # how many alternatives to show beside each token; None: no logprobs at all
    return_token_ids: bool
    shows_output: bool  # False: only the echoed prompt is wanted
    deadline: float | None = None  # seconds on the router's clock
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    tools: ToolPlan | None = None  # None: there are no calls in the answer
    thinking: ThinkingPlan | None = None  # None: there are no thoughts in it
    form: OutputForm = field(default_factory=OutputForm)  # not known to compile yet
    resumable: bool = False  # its events have ids
    after: EventMark | None = None  # what the client has of the stream; None: nothing

    @property
    def parsed(self) -> bool:
        """The answer is more than its text."""
        return self.tools is not None or self.thinking is not None

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that mean something to whoever parses the answer."""
        tools = frozenset[int]() if self.tools is None else self.tools.shown
        return tools if self.thinking is None else tools.union(self.thinking.special.values())

    @property
    def most_tokens(self) -> int:
        """What it may come to: every prompt once, and all the outputs."""
        return self.prompt_tokens + sum(sequence.request.sampling.max_tokens for sequence in self.sequences)
