"""The server against its own OpenAPI document (schemathesis): valid and invalid requests to every operation.

Required: no 5xx but a declared 503 or 507, and every answer as the document says. Left out is the check that data the document
allows is accepted: what a request may say depends on several fields at once (``top_logprobs`` needs ``logprobs``, a prompt has
to fit the context), which JSON schema cannot express; those refusals are 400 and name the field.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_kit
import httpx
import hypothesis
import pytest
import schemathesis
from hostile_servers import fake_app, serving, tiny_app
from schemathesis.checks import CHECKS, load_all_checks

from torpor.testing.fake_engine import FakeEngine

DECLARED_5XX = (503, 507)
LEFT_OUT = {
    "positive_data_acceptance",
    "not_a_server_error",  # it counts a declared 503, too: see check_status
}
pytestmark = pytest.mark.timeout(3600 if hostile_kit.SCALE > 1 else 120)


@pytest.fixture(scope="module", params=["fake", "tiny"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder: Path = tmp_path_factory.mktemp("model")
    app = fake_app(FakeEngine("abc")) if request.param == "fake" else tiny_app(folder, in_process=True)
    with serving(app) as url:
        yield request.param, url


def left_out() -> list[Any]:
    load_all_checks()
    found = [check for check in CHECKS.get_all() if check.__name__ in LEFT_OUT]
    assert len(found) == len(LEFT_OUT), "a check has another name now"
    return found


def check_status(case: schemathesis.Case, status: int, text: str) -> None:
    assert status < 500 or status in DECLARED_5XX, f"{case.as_curl_command()}\n{status} {text}"


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def test_every_operation_answers_as_the_document_says(server: tuple[str, str]) -> None:
    kind, url = server
    examples = hostile_kit.scaled(6 if kind == "fake" else 3)
    excluded = left_out()
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation in operations(url):
            for mode in schemathesis.GenerationMode:
                count = fuzz(operation, mode, examples, client, excluded)
                hostile_kit.tried(f"requests from the OpenAPI document, {kind} engine", count)
        assert client.post("/wake_up").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200, answer.text


def fuzz(operation: Any, mode: Any, examples: int, client: httpx.Client, excluded: list[Any]) -> int:
    count = 0

    @hypothesis.seed(hostile_kit.SEED)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=False
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        nonlocal count
        count += 1
        client.post("/wake_up")
        client.post("/resume")
        response = case.call(timeout=60)
        check_status(case, response.status_code, response.text)
        case.validate_response(response, excluded_checks=excluded)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        try:
            run()
        except hypothesis.errors.Unsatisfiable:  # an operation without parameters has no invalid request
            assert not operation.body, operation.label
    return count
