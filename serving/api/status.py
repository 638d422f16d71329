"""The small HTTP door of a process that serves no API: a worker's health, metrics and audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serving import __version__
from serving.api.settings import Health


def status_app(*, health: Health, metrics_text: Callable[[], bytes], audit: Callable[[], Mapping[str, int]]) -> FastAPI:
    """/health (503 while it cannot serve), /live, /metrics, /version, /audit."""
    app = FastAPI(title="millrace worker", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def read_health() -> JSONResponse:
        ready, why = health()
        return JSONResponse({"status": why}, 200 if ready else 503)

    @app.get("/live")
    async def read_live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def read_version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/audit")
    async def read_audit() -> dict[str, int]:
        return dict(audit())

    return app
