"""The OpenAI-compatible HTTP API over a `generate` that it is given: the table of its endpoints.

It knows neither router nor workers; health, audit, metrics and placements come in from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from serving import __version__
from serving.api.constraints import Constraints
from serving.api.explain import SALT, RequestNames, explain
from serving.api.failures import handle_failures
from serving.api.generation import GenerationResponse, Service
from serving.api.in_flight import InFlightRequests
from serving.api.middleware import AuthMiddleware
from serving.api.objectives import PromiseReader
from serving.api.openapi import describe_bodies, takes
from serving.api.prepare import Preparer
from serving.api.prompts import PromptReader
from serving.api.rate_limit import RateLimiter
from serving.api.schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from serving.api.settings import ApiObserver, Health, NoPlacementLog, PlacementLog, ReadAudit, ServedModel
from serving.api.status import add_process_routes
from serving.api.thinking import ThinkingReader
from serving.api.tokens import TokenEndpoints
from serving.api.tools import ToolReader
from serving.config import HttpConfig
from serving.errors import NotFound, Unavailable
from serving.messages import Generate
from serving.service_class import SERVICE_CLASSES, ServiceClass
from serving.service_config import ServiceConfig
from serving.text.tokenizer import Tokenizer


def create_app(
    generate: Generate,
    *,
    tokenizer: Tokenizer,
    served: ServedModel,
    config: HttpConfig,
    health: Health,
    audit: ReadAudit,
    metrics_text: Callable[[], bytes],
    observer: ApiObserver,
    service_config: ServiceConfig | None = None,
    classes: Mapping[str, ServiceClass] = SERVICE_CLASSES,
    clock: Callable[[], float] = time.monotonic,
    placements: PlacementLog | None = None,
) -> FastAPI:
    """The ASGI application. `app.state.in_flight` is the `InFlightRequests` through which a server drains it.

    `clock` is the router's: deadlines are times on it.
    Raises `ValueError` when the tokenizer's chat template is not valid.
    """
    app = FastAPI(title="millrace", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    in_flight = app.state.in_flight = InFlightRequests()
    app.add_middleware(AuthMiddleware, api_key=config.api_key)
    handle_failures(app)
    prompts = PromptReader(tokenizer=tokenizer, served=served, tool_call_parser=config.tool_call_parser)
    service_config = service_config or ServiceConfig()
    service = Service(
        generate=generate,
        tokenizer=tokenizer,
        config=config,
        in_flight=in_flight,
        observer=observer,
        clock=clock,
        limits=RateLimiter(service_config.rate_limit_requests, service_config.rate_limit_tokens),
        placements=placements or NoPlacementLog(),
        names=RequestNames(),
    )
    objectives = PromiseReader(classes, service_config.default_service_class)
    preparer = Preparer(
        served=served,
        prompts=prompts,
        objectives=objectives,
        constraints=Constraints(tokenizer),
        strict_fields=config.strict_fields,
        tools=ToolReader(tokenizer, prompts.tool_prompt),
        thinking=ThinkingReader(tokenizer, config.reasoning_parser),
    )
    _add_generation(app, service, preparer)
    _add_models(app, served)
    _add_placements(app, service)
    _add_tokens(
        app,
        TokenEndpoints(tokenizer=tokenizer, served=served, prompts=prompts, config=config, observer=observer),
    )
    _add_operations(app, in_flight, health, audit)
    add_process_routes(app, metrics_text)
    describe_bodies(app, [ChatCompletionBody, CompletionBody, TokenizeBody, DetokenizeBody])
    return app


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _add_generation(app: FastAPI, service: Service, preparer: Preparer) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatCompletionBody))
    async def chat_completions(request: Request) -> Response:
        return GenerationResponse(service, preparer.chat, request.headers, request.state)

    @app.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        return GenerationResponse(service, preparer.completion, request.headers, request.state)


def _add_placements(app: FastAPI, service: Service) -> None:
    @app.get("/v1/requests/{name}/explain")
    async def explain_request(name: str, request: Request) -> Response:
        salt = request.headers.get(SALT, "")
        return _json(explain(service.names, service.placements, name, request.state.key, salt))

    @app.get("/v1/workers")
    async def workers() -> Response:
        return _json(service.placements.workers())


def _add_models(app: FastAPI, served: ServedModel) -> None:
    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "millrace",
            "root": served.names[0],
            "parent": None,
            "max_model_len": served.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in served.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in served.names:
            raise NotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return _json(card(name))


def _add_tokens(app: FastAPI, tokens: TokenEndpoints) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return _json(await tokens.answer(request, tokens.tokenize))

    @app.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return _json(await tokens.answer(request, tokens.detokenize))


def _add_operations(app: FastAPI, in_flight: InFlightRequests, health: Health, audit: ReadAudit) -> None:
    @app.get("/health")
    async def healthy() -> Response:
        if in_flight.draining:
            raise Unavailable("the server is shutting down", code="draining")
        able, reason = health()
        if not able:
            raise Unavailable(reason, code="unhealthy")
        return _json({"status": "ok"} if reason == "ok" else {"status": "degraded", "detail": reason})

    @app.get("/ping")
    @app.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        return await healthy()

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": in_flight.count})

    @app.get("/audit")
    async def read_audit() -> Response:
        return _json(await audit())
