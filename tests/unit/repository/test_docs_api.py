"""The tables of docs/api.md and docs/security.md are those of the code; the endpoints describe themselves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tba.clients import BufferClient, RewardClient
from tests.support.api_documents import PAGE, documents, operations


def test_the_tables_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, "tools/api_docs.py", "--check"], cwd=PAGE.parents[1])
    assert done.returncode == 0, "run `make api-docs`"


def test_every_endpoint_needs_a_role_or_is_meant_for_anyone() -> None:
    open_to_all = {path for _, path, operation in operations() if "security" not in operation}
    assert open_to_all == {"/livez", "/readyz", "/metrics", "/version"}


def test_operations_are_called_as_the_clients_methods() -> None:
    methods = {name for client in (BufferClient, RewardClient) for name in dir(client)}
    ids = {operation["operationId"] for _, path, operation in operations() if path.startswith("/v1")}
    assert ids <= methods


def test_every_endpoint_answers_errors_with_a_problem_document() -> None:
    for method, path, operation in operations():
        others = {status: found for status, found in operation["responses"].items() if not status.startswith("2")}
        assert {status: list(found["content"]) for status, found in others.items()} == {
            "default": ["application/problem+json"]
        }, (method, path)


@pytest.mark.parametrize("document", documents(), ids=["buffer", "reward"])
def test_operation_ids_are_unique_and_every_operation_is_described(document: dict[str, Any]) -> None:
    found = [operation for methods in document["paths"].values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in found]
    assert len(ids) == len(set(ids))
    assert [operation["operationId"] for operation in found if not operation.get("description")] == []
