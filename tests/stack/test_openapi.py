"""The gateway conforms to its OpenAPI document for any request.

schemathesis generates 500 valid and invalid requests from the document. Only the tests import it, because the import
takes seconds, and every test process collects all files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stack import HANG_S, Stack

if TYPE_CHECKING:
    from schemathesis import Case
    from schemathesis.schemas import APIOperation


@pytest.fixture(scope="module")
def operations(stack: Stack) -> list[APIOperation[Any, Any, Any, Any]]:
    """The operations of the document, with the name of the served model, so that requests do not all end with 404."""
    import schemathesis

    content = httpx.get(f"{stack.gateway}/openapi.json", timeout=HANG_S).json()
    model = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    for name in ("ChatRequest", "CompletionRequest", "MessagesRequest", "CountTokensRequest", "ResponsesRequest"):
        content["components"]["schemas"][name]["properties"]["model"] = {"const": model}
    schema = schemathesis.openapi.from_dict(content)
    schema.config.update(base_url=stack.gateway)
    # A list with too many items may also exceed the limit of the body.
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, "413"]
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.parametrize(
    ("method", "mode", "count"),
    [
        ("post", "positive", 230),
        ("post", "negative", 230),
        ("get", "positive", 40),  # these routes have no input that could be wrong
    ],
)
def test_responses_conform_to_openapi_document(
    operations: list[APIOperation[Any, Any, Any, Any]], method: str, mode: str, count: int
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    # No response has status 500 or an undocumented status or form, and no request is accepted that the document
    # forbids. The gateway may reject a request that the document allows: OpenAPI cannot describe dependencies between
    # fields.
    promised = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    chosen = [operation for operation in operations if operation.method == method]
    assert len(chosen) >= 3

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.one_of([operation.as_strategy(GenerationMode(mode)) for operation in chosen]))
    def check(case: Case) -> None:
        if isinstance(case.body, dict):  # short responses
            case.body.setdefault("request_output_len" if "interactive" in case.path else "max_tokens", 2)
        if mode == "positive" and isinstance(case.body, dict) and "timeout" in case.body:
            case.body["timeout"] = HANG_S  # a shorter timeout correctly ends with 504
        case.call_and_validate(checks=promised, timeout=HANG_S)

    check()
