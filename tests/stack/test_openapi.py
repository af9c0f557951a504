"""The gateway does what its OpenAPI document says, whatever is sent.

schemathesis makes 500 requests from the document, right and wrong ones.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from stack import HANG_S, Stack

# Nothing ends with 500, with an undocumented status or form, and nothing is taken that the document forbids. What the
# document allows may be refused: it cannot say how fields depend on each other.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def operations(stack: Stack) -> list[APIOperation[Any, Any, Any, Any]]:
    """Of the document with the name of the model that is served, so that requests come further than to 404."""
    content = httpx.get(f"{stack.gateway}/openapi.json", timeout=HANG_S).json()
    model = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    for name in ("ChatRequest", "CompletionRequest"):
        content["components"]["schemas"][name]["properties"]["model"] = {"const": model}
    schema = schemathesis.openapi.from_dict(content)
    schema.config.update(base_url=stack.gateway)
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.parametrize(
    ("method", "mode", "count"),
    [
        ("post", GenerationMode.POSITIVE, 230),
        ("post", GenerationMode.NEGATIVE, 230),
        ("get", GenerationMode.POSITIVE, 40),  # they take nothing that could be wrong
    ],
)
def test_requests_are_answered_as_the_document_says(
    operations: list[APIOperation[Any, Any, Any, Any]], method: str, mode: GenerationMode, count: int
) -> None:
    chosen = [operation for operation in operations if operation.method == method]
    assert len(chosen) >= 3

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.one_of([operation.as_strategy(mode) for operation in chosen]))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):  # answers are short
            case.body.setdefault("request_output_len" if "interactive" in case.path else "max_tokens", 2)
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict) and "timeout" in case.body:
            case.body["timeout"] = HANG_S  # a shorter one is 504, as it should be
        case.call_and_validate(checks=CHECKS, timeout=HANG_S)

    check()
