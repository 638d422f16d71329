"""The HTTP API, in OpenAI's and Anthropic's dialects, over a `generate` that it is given: the table of its endpoints.

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
from serving.api.access_log import log_answer
from serving.api.body import read_body
from serving.api.body_work import BodyWork, client_of
from serving.api.callers import Callers
from serving.api.cors import allow_origins
from serving.api.dialect import Dialect
from serving.api.embedding_plan import EmbeddingPreparer
from serving.api.embeddings import EmbeddingResponse
from serving.api.explain import SALT, RequestNames, explain
from serving.api.failures import handle_failures
from serving.api.generation import GenerationResponse
from serving.api.grammar_gate import GrammarGate
from serving.api.in_flight import InFlightRequests
from serving.api.keyring import Keyring
from serving.api.messages_body import CountTokensBody
from serving.api.middleware import AnsweredMiddleware, AuthMiddleware, Teller, observed_by
from serving.api.openapi import describe_bodies, takes
from serving.api.rate_limit import KeyLimits, RateLimiter
from serving.api.readers import Readers, ReaderSettings
from serving.api.schema import DetokenizeBody, EmbeddingBody, TokenizeBody
from serving.api.service import Service, reserved, tell_ignored, tell_refusal, until_hang_up
from serving.api.settings import ApiObserver, Health, HttpObserver, NoPlacementLog, PlacementLog, ReadAudit, ServedModel
from serving.api.status import add_process_routes
from serving.api.tokens import Answer
from serving.config import HttpConfig
from serving.errors import MillraceError, NotFound, Unavailable
from serving.messages import Generate
from serving.service_class import SERVICE_CLASSES, ServiceClass
from serving.service_config import ServiceConfig
from serving.text.tokenizer import Tokenizer

OTHER_BODIES = (EmbeddingBody, TokenizeBody, DetokenizeBody, CountTokensBody)


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
    http_observer: HttpObserver | None = None,
    keyring: Keyring | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI app. Of `app.state`, a server drains it through `in_flight` (InFlightRequests), may start `bodies`
    (BodyWork), so that long ones are read in processes of their own, and closes those and `grammars` (GrammarGate).

    `clock` is the router's: deadlines are times on it. Keys expire by `wall_clock`, in Unix seconds.
    `app.state.callers` (Callers) counts requests without a valid one.
    Raises `ValueError` when the tokenizer's chat template is not valid.
    """
    app = FastAPI(title="millrace", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    in_flight = app.state.in_flight = InFlightRequests()
    callers = app.state.callers = Callers(config.api_key, keyring, wall_clock)
    _surround(app, callers, http_observer, clock)
    service_config = service_config or ServiceConfig()
    settings = ReaderSettings(
        tokenizer=tokenizer,
        served=served,
        config=config,
        classes=classes,
        default_class=service_config.default_service_class,
    )
    bodies = app.state.bodies = BodyWork(settings)
    service = Service(
        generate=generate,
        tokenizer=tokenizer,
        config=config,
        in_flight=in_flight,
        observer=observer,
        clock=clock,
        limits=_limiter(service_config),
        placements=placements or NoPlacementLog(),
        names=RequestNames(),
        bodies=bodies,
        grammars=GrammarGate(tokenizer),
    )
    app.state.grammars, readers = service.grammars, bodies.readers
    _add_served(app, service, readers, served)
    _add_placements(app, service)
    _add_tokens(app, service, readers)
    _add_operations(app, in_flight, health, audit)
    add_process_routes(app, metrics_text)
    describe_bodies(app, [*(dialect.kind for dialect in readers.dialects), *OTHER_BODIES])
    allow_origins(app, config)
    return app


def _limiter(config: ServiceConfig) -> RateLimiter:
    return RateLimiter(KeyLimits(requests=config.rate_limit_requests, tokens=config.rate_limit_tokens))


def _surround(app: FastAPI, callers: Callers, observer: HttpObserver | None, clock: Callable[[], float]) -> None:
    """What stands around every endpoint; CORS comes last, when the app is complete."""
    app.add_middleware(AuthMiddleware, callers=callers)
    tellers: list[Teller] = [log_answer, *([observed_by(observer)] if observer is not None else [])]
    app.add_middleware(AnsweredMiddleware, tellers=tellers, clock=clock)
    handle_failures(app)


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _add_served(app: FastAPI, service: Service, readers: Readers, served: ServedModel) -> None:
    """The models, and what they do: texts in every dialect, and embeddings."""
    for dialect in readers.dialects:
        _add_generation(app, service, dialect)
    _add_embeddings(app, service, readers.embeddings)
    _add_models(app, served)


def _add_generation(app: FastAPI, service: Service, dialect: Dialect) -> None:
    @app.post(dialect.path, name=type(dialect).__name__, openapi_extra=takes(dialect.kind))
    async def generate(request: Request) -> Response:
        return GenerationResponse(service, dialect, request.headers, request.state)


def _add_embeddings(app: FastAPI, service: Service, preparer: EmbeddingPreparer) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        return EmbeddingResponse(service, preparer.prepare, request.headers, request.state)


def _add_placements(app: FastAPI, service: Service) -> None:
    @app.get("/v1/requests/{name}/explain")
    async def explain_request(name: str, request: Request) -> Response:
        salt = request.state.caller.rights.within(request.headers.get(SALT, ""))
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


def _add_tokens(app: FastAPI, service: Service, readers: Readers) -> None:
    tokens = readers.tokens

    async def answer(request: Request, work: Callable[[bytes], Answer]) -> Response:
        state, client = request.state, client_of(request.scope)
        try:
            with reserved(service, state.caller, state.answer_headers):
                body = await read_body(request.receive, request.headers, service.config)
                told, ignored = await until_hang_up(request.receive, service.bodies.run(work, body, client=client))
        except MillraceError as error:
            tell_refusal(error, state.answer_headers, service.observer)
            raise
        tell_ignored(ignored, state.answer_headers, service.observer)
        return Response(told, media_type="application/json")

    @app.post("/tokenize", openapi_extra=takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return await answer(request, tokens.tokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return _json(tokens.info())

    @app.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return await answer(request, tokens.detokenize)

    @app.post(f"{readers.messages.path}/count_tokens", openapi_extra=takes(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        return await answer(request, readers.messages.count)


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
