"""Routes that every process has, /live, /metrics and /version, and the small HTTP app of one that serves no API."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serving import __version__
from serving.api.settings import Health


def add_process_routes(app: FastAPI, metrics_text: Callable[[], bytes]) -> None:
    @app.get("/live")
    async def live() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


def status_app(
    *, health: Health, metrics_text: Callable[[], bytes], audit: Callable[[], Mapping[str, int]] | None = None
) -> FastAPI:
    """/health (503 while it cannot serve) and, where there is one, /audit, beside what every process has."""
    app = FastAPI(title="millrace worker", version=__version__, docs_url=None, redoc_url=None)
    add_process_routes(app, metrics_text)

    @app.get("/health")
    async def read_health() -> JSONResponse:
        ready, why = health()
        return JSONResponse({"status": why}, 200 if ready else 503)

    if audit is not None:
        read = audit

        @app.get("/audit")
        async def read_audit() -> JSONResponse:
            return JSONResponse(dict(read()))

    return app
