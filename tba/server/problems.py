"""RFC 9457 problem documents: every endpoint reports errors in this one format."""

from __future__ import annotations

from http import HTTPStatus
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tba.errors import BusyError, LimitError, TbaError, UnauthorizedError
from tba.fields import own_words
from tba.logs import get_logger
from tba.tls import with_bare_urls

TYPE_PREFIX = "urn:tba:problem:"
UNAVAILABLE_RETRY_S = 1
"""Value of Retry-After for 503, in seconds: an unavailable service checks this often whether it is available again."""
MAX_ERRORS_SAID = 3
MAX_WHERE_CHARS = 200
log = get_logger("http")

_short = Repr()  # bounds the work too: the value may be a whole body
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlevel, _short.maxdict, _short.maxlist = 2, 4, 4


def problem_response(
    *, status: int, slug: str, detail: str, headers: dict[str, str] | None = None, **extra: Any
) -> JSONResponse:
    """Return a response `application/problem+json`, with the type TYPE_PREFIX + `slug`. `extra`: more members."""
    body = {"type": TYPE_PREFIX + slug, "title": HTTPStatus(status).phrase, "status": status}
    body |= {"detail": with_bare_urls(detail), **extra}
    return JSONResponse(body, status_code=status, headers=headers, media_type="application/problem+json")


def error_response(error: TbaError) -> JSONResponse:
    """Return the problem document for a TbaError, with Retry-After for a BusyError or a status of 503."""
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        extra = {"retry_after_s": error.retry_after_s, "wait": error.wait}
    elif error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(UNAVAILABLE_RETRY_S)
    if isinstance(error, UnauthorizedError) and error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return problem_response(status=error.status, slug=error.slug, detail=str(error), headers=headers, **extra)


def _invalid_field(error: dict[str, Any]) -> str:
    """Return a sentence about a wrong field: its place, the problem and its value."""
    place, *names = map(str, error["loc"] or ("body",))
    # a parameter is called as the client wrote it; the fields of a body stand below `body`
    parts = names if place != "body" and names else [place, *names]
    where = ".".join(part[:MAX_WHERE_CHARS] for part in parts)[:MAX_WHERE_CHARS]
    # no field has a wrong value here: the words of the parser say more
    if error["type"] == "json_invalid":
        return f"{where}: not JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if error["type"] == "missing":
        return f"{where}: {error['msg']}"
    return f"{where}: {own_words(error['msg'])} (value {_short.repr(error.get('input'))})"


def install_problem_handlers(app: FastAPI) -> None:
    """Install handlers that turn every error of every endpoint into a problem document, never a traceback."""

    @app.exception_handler(TbaError)
    async def _tba(_: Request, error: TbaError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        said = [_invalid_field(each) for each in errors[:MAX_ERRORS_SAID]]
        if len(errors) > MAX_ERRORS_SAID:
            said.append(f"and {len(errors) - MAX_ERRORS_SAID} more")
        # the value may hold lone surrogates, which no JSON response can carry
        detail = "; ".join(said).encode(errors="backslashreplace").decode()
        return problem_response(status=422, slug="invalid-body", detail=detail)

    @app.exception_handler(UnicodeEncodeError)
    # a lone surrogate in JSON is valid for the parser and for nobody after it
    async def _text(_: Request, error: UnicodeEncodeError) -> JSONResponse:
        detail = f"a text of the request cannot be written as UTF-8: {error.reason}"
        return problem_response(status=422, slug="invalid-body", detail=detail)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:  # FastAPI could not parse it
            detail = f"body: cannot be read as JSON: {error.__cause__}"
            return problem_response(status=422, slug="invalid-body", detail=detail)
        # 404 and 405 of the router: their slug is the name of the status
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
