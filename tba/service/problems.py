"""RFC 9457 problem documents: one error shape on every endpoint."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tba.errors import BusyError, LimitError, TbaError, UnauthorizedError
from tba.logs import get_logger

TYPE_PREFIX = "urn:tba:problem:"
log = get_logger("http")


def problem_response(
    *, status: int, slug: str, detail: str, headers: dict[str, str] | None = None, **extra: Any
) -> JSONResponse:
    """`application/problem+json` with a stable type."""
    body = {"type": TYPE_PREFIX + slug, "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **extra}
    return JSONResponse(body, status_code=status, headers=headers, media_type="application/problem+json")


def error_response(error: TbaError) -> JSONResponse:
    """The problem document of one of our errors; BusyError adds Retry-After and the name of the wait."""
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        extra = {"retry_after_s": error.retry_after_s, "wait": error.wait}
    if isinstance(error, UnauthorizedError) and error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return problem_response(status=error.status, slug=error.slug, detail=str(error), headers=headers, **extra)


def install_problem_handlers(app: FastAPI) -> None:
    """Every error of every endpoint becomes a problem document; nobody sees a traceback."""

    @app.exception_handler(TbaError)
    async def _tba(_: Request, error: TbaError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
        value = f" (value {str(first.get('input'))[:80]!r})" if first["type"] != "missing" else ""
        return problem_response(status=422, slug="invalid-body", detail=f"{where}: {first['msg']}{value}{more}")

    @app.exception_handler(UnicodeEncodeError)
    async def _text(_: Request, error: UnicodeEncodeError) -> JSONResponse:
        detail = f"a text of the request cannot be written as UTF-8: {error.reason}"
        return problem_response(status=422, slug="invalid-body", detail=detail)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        phrase = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        return problem_response(
            status=error.status_code,
            slug=LimitError.slug if error.status_code == LimitError.status else phrase,
            detail=f"{request.method} {request.url.path}: {error.detail}",
            headers=dict(error.headers or {}),
        )

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        log.error("unhandled_error", path=request.url.path, exc_info=error)
        return problem_response(
            status=500, slug="internal", detail=f"{type(error).__name__} in {request.url.path}; the log has more"
        )
