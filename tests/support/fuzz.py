"""Schemathesis over real HTTP: random requests from an OpenAPI document, and checks of every answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, CheckContext, GenerationMode, Response, SerializationContext
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

PROBLEM = "application/problem+json"
Change = Callable[[Case], None]


@schemathesis.serializer("application/msgpack")
def _msgpack(_: SerializationContext, value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value).encode(errors="backslashreplace")


def errors_are_problems(_: CheckContext, response: Response, case: Case) -> None:
    """Check that every error is a problem document with the response's status and a detail that is not empty."""
    if response.status_code < 400:
        return
    content_type = response.headers.get("content-type", [""])[0]
    assert content_type == PROBLEM, f"{case.method} {case.path}: {response.status_code} as {content_type!r}"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["type"].startswith("urn:tba:problem:")
    assert problem["detail"], "an error without a sentence"


def what_does_not_fit_is_refused(ctx: CheckContext, response: Response, case: Case) -> bool | None:
    """Check that a request that breaks the document gets no success; 413 counts as a refusal."""
    return None if response.status_code == 413 else negative_data_rejection(ctx, response, case)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    errors_are_problems,
]


def load_schema(document: Mapping[str, Any]) -> Any:
    """Return the document as a schemathesis schema, without security: the servers under test ask for no token."""
    open_to_all = deepcopy(dict(document))
    open_to_all["components"].pop("securitySchemes")
    for methods in open_to_all["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    return schemathesis.openapi.from_dict(open_to_all)


def operations(document: Mapping[str, Any]) -> list[Any]:
    """Return one pytest parameter (path, method) per operation of the document, with the operation id as its id."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found.append(pytest.param(path, method, id=operation["operationId"]))
    return found


def fuzz(
    schema: Any,
    path: str,
    method: str,
    *,
    base_url: str,
    max_examples: int,
    known: Change,
    always: Change | None = None,
    anything_fits: bool = False,
) -> None:
    """Send requests that fit the document and requests that break it, and check every answer.

    Args:
        known: puts existing tokens and ids into a request, which chance would never find; it is called for about half
            of the requests that fit.
        always: changes every request, for example to shorten waits.
        anything_fits: whether no request can break the document (a body of any bytes); then only fitting ones are sent.

    Raises:
        AssertionError, schemathesis.core.failures.FailureGroup: a check failed; with the request.
    """
    operation = schema[path][method.upper()]
    limits = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

    def send(case: Case, checks: list[Any]) -> None:
        if always is not None:
            always(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the package requests
            case.call_and_validate(base_url=base_url, checks=checks)

    @limits
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), use_known=st.booleans())
    def fits(case: Case, use_known: bool) -> None:
        if use_known:
            known(case)
        send(case, CHECKS)

    @limits
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def does_not_fit(case: Case) -> None:
        send(case, [*CHECKS, what_does_not_fit_is_refused])

    fits()
    if not anything_fits and (operation.body or operation.query or operation.path_parameters):
        does_not_fit()
