"""Add to the OpenAPI document what FastAPI cannot know: problem documents, roles, msgpack bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Response, routing
from fastapi.responses import JSONResponse

from tba.api import Problem

BINARY = {"type": "string", "format": "binary"}
MSGPACK_BODY = {"requestBody": {"required": True, "content": {"application/msgpack": {"schema": BINARY}}}}
"""Argument `openapi_extra` of an endpoint that reads a msgpack body itself."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem document (RFC 9457); docs/api.md lists them",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""Argument `responses` of an application: the error replies of every endpoint."""


def install_openapi(app: FastAPI) -> None:
    """Complete the document of `app.openapi()`, and serve it at GET /openapi.json."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = of_fastapi()
        components = document.setdefault("components", {})
        # FastAPI keeps the document and returns the same one every time
        if "securitySchemes" not in components:
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            _complete(app, document)
        return document

    app.openapi = openapi
    rendered: list[bytes] = []

    # instead of FastAPI's, which renders the document for each request, and anybody may ask
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Response:
        if not rendered:  # once: the document never changes
            rendered.append(bytes(JSONResponse(app.openapi()).body))
        return Response(rendered[0], media_type="application/json")


def _complete(app: FastAPI, document: dict[str, Any]) -> None:
    # FastAPI before 0.138, which vLLM 0.32 requires, keeps the routes of all routers in one list
    contexts = getattr(routing, "iter_route_contexts", None)
    plain = [route for route in app.routes if isinstance(route, routing.APIRoute)]
    routes: Iterable[Any] = contexts(app.routes) if contexts else plain
    for route in routes:
        for method in route.methods or ():
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is None:
                continue
            roles = sorted({role for needed in route.dependencies for role in getattr(needed.dependency, "roles", ())})
            if roles:
                operation["security"] = [{"bearer": [role]} for role in roles]
                # OpenAPI has no place for roles of a bearer token, so the text names them too
                operation["description"] = f"{operation.get('description', '')}\n\nRoles: {', '.join(roles)}.".strip()
            for response in operation["responses"].values():
                if "application/msgpack" in response.get("content", {}):
                    response["content"]["application/msgpack"]["schema"] = BINARY
