"""Lets pages of other origins call the API from a browser: CORS, around every answer of the app, errors included.

A preflight is answered here, before the API key is asked for and before anything else is reached.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from serving.config import HttpConfig

# Headers of answers that a page may read besides those that any page may.
EXPOSED = (
    "x-request-id",
    "request-id",
    "x-millrace-placement",
    "x-millrace-downgrade",
    "x-millrace-degraded",
    "x-millrace-ignored",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-should-retry",
    "retry-after",
    "www-authenticate",
)


def allow_origins(app: FastAPI, config: HttpConfig) -> None:
    """Put CORS around an app that is otherwise finished; where no origin is allowed, leave it as it is.

    A middleware that is added to an app stands inside of what answers an exception with a 500, which would then come
    without these headers. So this one is put around the whole stack.
    """
    if not config.allowed_origins:
        return
    app.middleware_stack = CORSMiddleware(
        app.build_middleware_stack(),
        allow_origins=[origin.rstrip("/") for origin in config.allowed_origins],
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )
