"""Makes /openapi.json say what the generation endpoints take, although they read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serving.api.objectives import HEADERS, READ
from serving.api.schema import GenerationBody, PlacedBody

_REFERENCE = "#/components/schemas/{model}"


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint whose body is a `kind`."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not issubclass(kind, PlacedBody):
        return {"requestBody": body}
    read = READ if issubclass(kind, GenerationBody) else HEADERS
    headers = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}} for name, text in read.items()
    ]
    return {"parameters": headers, "requestBody": body}


def describe_bodies(app: FastAPI, kinds: list[type[BaseModel]]) -> None:
    """Add the schemas of `kinds` to the app's OpenAPI document, which is written when first asked for."""
    write = app.openapi

    def openapi() -> dict[str, Any]:
        document = write()
        _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way to extend the document
