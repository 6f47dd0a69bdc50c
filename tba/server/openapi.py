"""The parts of the OpenAPI document that FastAPI cannot see: problem documents, roles, msgpack bodies."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Response, routing
from fastapi.responses import JSONResponse

from tba.api import Problem

PROBLEM = "application/problem+json"
BINARY = {"type": "string", "format": "binary"}
MSGPACK_BODY = {"requestBody": {"required": True, "content": {"application/msgpack": {"schema": BINARY}}}}
"""`openapi_extra` of an endpoint that reads msgpack itself."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of an endpoint: the statuses that it answers with a problem document, beyond the usual
    ones.

    The usual ones are 500 and 503 anywhere under /v1, 401 and 403 with roles, 404 with a path parameter, 413 with a
    body, and 422 with parameters or a body.
    """
    return {status: _response(status) for status in statuses}


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` complete."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = of_fastapi()
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        # FastAPI keeps the document and returns the same one every time
        if "Problem" not in schemas:
            schemas["Problem"] = Problem.model_json_schema()
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            _complete(app, document)
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        return document

    app.openapi = openapi
    rendered: list[bytes] = []

    # instead of FastAPI's, which renders the document for each request, and anybody may ask
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Response:
        if not rendered:  # once: the document never changes
            rendered.append(bytes(JSONResponse(app.openapi()).body))
        return Response(rendered[0], media_type="application/json")


def _routes(app: FastAPI) -> Iterable[Any]:
    # FastAPI before 0.138, which vLLM 0.32 requires, keeps the routes of all routers in one list
    contexts = getattr(routing, "iter_route_contexts", None)
    return contexts(app.routes) if contexts else [route for route in app.routes if isinstance(route, routing.APIRoute)]


def _complete(app: FastAPI, document: dict[str, Any]) -> None:
    for route in _routes(app):
        for method in route.methods or ():
            operation = document["paths"].get(route.path_format, {}).get(method.lower())
            if operation is None:
                continue
            roles = sorted({role for needed in route.dependencies for role in getattr(needed.dependency, "roles", ())})
            statuses = _usual(route.path_format or "", operation, has_roles=bool(roles))
            responses = {**{str(status): _response(status) for status in statuses}, **operation["responses"]}
            if "422" in responses:  # not the one of FastAPI, whose handler is replaced
                responses["422"] = _response(422)
            operation["responses"] = dict(sorted(responses.items()))
            if roles:
                operation["security"] = [{"bearer": [role]} for role in roles]
                # OpenAPI has no place for roles of a bearer token, so the text names them too
                operation["description"] = f"{operation.get('description', '')}\n\nRoles: {', '.join(roles)}.".strip()
            for response in operation["responses"].values():
                if "application/msgpack" in response.get("content", {}):
                    response["content"]["application/msgpack"]["schema"] = BINARY


def _usual(path: str, operation: dict[str, Any], *, has_roles: bool) -> set[int]:
    statuses = {500, 503} if path.startswith("/v1") else set()
    if has_roles:
        statuses |= {401, 403}
    if "{" in path:
        statuses.add(404)
    if "requestBody" in operation:
        statuses |= {413, 422}
    if operation.get("parameters"):
        statuses.add(422)
    return statuses


def _response(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": {PROBLEM: {"schema": schema}}}
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        response["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "string"}}}
    return response
