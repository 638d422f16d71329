"""The one error tree: each class knows its HTTP status and its gRPC code, and a Retryable is placed again.

    MillraceError
    ├── InvalidRequest            400  INVALID_ARGUMENT     names the field at fault
    │   └── ContextLengthExceeded 400  INVALID_ARGUMENT     says by how many tokens
    ├── Unauthorized              401  UNAUTHENTICATED
    ├── Forbidden                 403  PERMISSION_DENIED    not with this API key
    ├── NotFound                  404  NOT_FOUND
    ├── RequestTimeout            408  DEADLINE_EXCEEDED    the client sent its body too slowly
    ├── Diverged                  409  ABORTED              a stream cannot go on where it broke off
    ├── PayloadTooLarge           413  RESOURCE_EXHAUSTED
    ├── Overloaded                429  RESOURCE_EXHAUSTED   carries Retry-After
    ├── RateLimited               429  RESOURCE_EXHAUSTED   of an API key; its `kind` is OpenAI's, requests or tokens
    │   ├── TokenRateLimited      429  RESOURCE_EXHAUSTED
    │   └── ConcurrencyLimited    429  RESOURCE_EXHAUSTED
    ├── InternalError             500  INTERNAL
    │   └── Quarantined           500  INTERNAL             workers died of the request: it is not to be sent again
    ├── Unavailable               503  UNAVAILABLE          carries Retry-After
    ├── DeadlineExceeded          504  DEADLINE_EXCEEDED
    └── Retryable                 503  the router answers these by placing the request again
        ├── NoRoom                     RESOURCE_EXHAUSTED   no blocks, or too many sequences, now
        ├── Draining                   UNAVAILABLE          the worker takes no new work
        ├── WorkerLost                 UNAVAILABLE          the worker died or stopped answering
        ├── Preempted                  ABORTED              others had its blocks or its turn
        ├── StaleLease                 FAILED_PRECONDITION  fence: lease, epoch or instance does not match
        └── CorruptChunk               DATA_LOSS            digest of a KV chunk does not match its bytes

This module knows no HTTP or gRPC library: serving.api.failures and serving.rpc map these to and from theirs.
"""

from __future__ import annotations

import struct
from typing import ClassVar


class MillraceError(Exception):
    """Base of every error millrace raises on purpose. What a class does not name it takes from its base.

    `status` is the HTTP status, `grpc_code` the name of a `grpc.StatusCode`, `kind` the OpenAI `error.type`.
    """

    status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    kind: ClassVar[str] = "server_error"
    by_name: ClassVar[dict[str, type[MillraceError]]] = {}
    """Every class of the tree: how an error keeps its type across a process boundary."""

    def __init_subclass__(cls, *, status: int | None = None, grpc_code: str | None = None, kind: str | None = None):
        super().__init_subclass__()
        cls.by_name[cls.__name__] = cls
        cls.status = status or cls.status
        cls.grpc_code = grpc_code or cls.grpc_code
        cls.kind = kind or cls.kind

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ):
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, as a path such as `messages[0].role`
        self.code = code  # a short machine-readable reason
        self.retry_after = retry_after  # seconds
        self.ignored: object = None  # what of the request's body was ignored, where it was read (serving.api.fields)


MillraceError.by_name["MillraceError"] = MillraceError


class InvalidRequest(MillraceError, status=400, grpc_code="INVALID_ARGUMENT", kind="invalid_request_error"):
    """The request cannot be served as written; `param` names the field."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context or the KV room of any worker."""


class Unauthorized(MillraceError, status=401, grpc_code="UNAUTHENTICATED", kind="authentication_error"): ...


class Forbidden(MillraceError, status=403, grpc_code="PERMISSION_DENIED", kind="permission_error"):
    """The API key is valid and may not do this."""


class NotFound(MillraceError, status=404, grpc_code="NOT_FOUND", kind="not_found_error"): ...


class RequestTimeout(MillraceError, status=408, grpc_code="DEADLINE_EXCEEDED", kind="timeout_error"): ...


class Diverged(MillraceError, status=409, grpc_code="ABORTED", kind="invalid_request_error"):
    """The answer came out another way than the stream that was to go on; another try would as well."""


class PayloadTooLarge(MillraceError, status=413, grpc_code="RESOURCE_EXHAUSTED", kind="invalid_request_error"): ...


class Overloaded(MillraceError, status=429, grpc_code="RESOURCE_EXHAUSTED", kind="overloaded_error"):
    """The queue is full, or the request waited in it as long as it may, or it would be late wherever it went."""


class RateLimited(MillraceError, status=429, grpc_code="RESOURCE_EXHAUSTED", kind="requests"):
    """The API key has sent as many requests as it may; `kind` is OpenAI's."""


class TokenRateLimited(RateLimited, kind="tokens"):
    """It has asked for as many tokens as it may."""


class ConcurrencyLimited(RateLimited):
    """It has as many requests in progress as it may."""


class InternalError(MillraceError):
    """A bug of ours, or a foreign failure that is not mapped."""


class Quarantined(InternalError):
    """Several workers died while they computed the request."""


class Unavailable(MillraceError, status=503, grpc_code="UNAVAILABLE", kind="service_unavailable_error"):
    """The service is starting, draining, or has no worker able to serve the request."""


class DeadlineExceeded(MillraceError, status=504, grpc_code="DEADLINE_EXCEEDED", kind="timeout_error"): ...


class Retryable(MillraceError, status=503, grpc_code="UNAVAILABLE", kind="service_unavailable_error"):
    """A failure of one placement, not of the request: another worker, or the same one later, may serve it."""


class NoRoom(Retryable, grpc_code="RESOURCE_EXHAUSTED"): ...


class Draining(Retryable): ...


class WorkerLost(Retryable):
    """Codes of a worker whose engine has died: IN_STEP for what it computed in that step, BESIDE_STEP for the rest.

    NEVER_SENT: nothing of the request has reached the worker, so it cannot have begun with it.
    """


IN_STEP, BESIDE_STEP, NEVER_SENT = "engine_step", "engine_died", "never_sent"


class Preempted(Retryable, grpc_code="ABORTED"):
    """LATE is the code of a prompt that was late before it had begun, and may be shed."""


LATE = "late"


class StaleLease(Retryable, grpc_code="FAILED_PRECONDITION"): ...


class CorruptChunk(Retryable, grpc_code="DATA_LOSS"): ...


# What a mistake of ours over one request, or a row of it, raises: the engine finds out whose it is
# (serving/engine/blame.py). RuntimeError is torch's too, its lack of device memory among them.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
