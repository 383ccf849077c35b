"""Requests that schemathesis makes from a server's OpenAPI page; a third of them are invalid."""

from collections import Counter
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fuzz.targets import PATIENCE_S, Target

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
Seen = Counter[tuple[str, int]]


def send_generated(target: Target, cases: int, derandomize: bool) -> Seen:
    """Send ``cases`` requests and compare every answer with the page. Return the count per status.

    Any 5xx is a failure, documented or not: no request here gives a server a reason for one.
    """
    load_all_checks()
    page = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    page = page.include(path_regex=target.paths)
    valid = page.as_strategy(generation_mode=GenerationMode.POSITIVE)
    wrong = page.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    seen: Seen = Counter()

    def aimed(case: Any) -> Any:
        if isinstance(case.body, dict):
            case.body = target.aim(case.body)
        return case

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=valid | valid.map(aimed) | wrong)
    def send_case(case: Any) -> None:
        target.before(http, case.body)
        response = case.call(base_url=target.url, session=session, timeout=PATIENCE_S)
        seen[case.operation.label, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    http = httpx.Client(base_url=target.url, timeout=PATIENCE_S)
    with http, requests.Session() as session:
        send_case()
    return seen
