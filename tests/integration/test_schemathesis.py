"""Requests that schemathesis makes up from our own description: no 5xx, no hang, no answer that is not described."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as specs
from starlette.applications import Starlette
from starlette.routing import Route

from router import page
from router.generation import ServedModel
from router.http.api import ApiSettings, build_app
from router.http.openapi import description as describe
from tests.fakes import EOS, FakeGenerator, FakeTokenizers, commits, tiny_tokenizer

CHECKED = [
    not_a_server_error,
    specs.status_code_conformance,
    specs.content_type_conformance,
    specs.response_schema_conformance,
]
TEXT = "hello <tool_call>{}</tool_call> 世界 🎉"


PATHS = [(method, path) for path, methods in describe("")["paths"].items() for method in methods if path != "/ready"]
"""Not ``/ready``, which answers 503 without a router behind it."""


PATIENT = 60
"""Seconds."""
REQUIRED = frozenset({"prompt", "messages", "model"})
PLAIN = {
    "/v1/completions": {"model": "tiny", "prompt": "hello"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
}


@cache
def app() -> Starlette:
    tokenizer = tiny_tokenizer("{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}.")
    tokens = (*tokenizer.encode(TEXT, special=False), EOS)
    model = ServedModel("tiny", tokenizer.size, 256, tokenizer.digest)
    generator = FakeGenerator(lambda _: commits(tokens * 10, (1, 4, 2)), model=model)
    return build_app(generator, FakeTokenizers(tokenizer), ApiSettings(max_choices=4))


@cache
def description() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", app())


def test_every_route_but_those_of_the_page_is_described() -> None:
    routes = {route.path for route in app().routes if isinstance(route, Route)} - page.PATHS
    assert {path.replace(":path}", "}") for path in routes} == set(describe("")["paths"])


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_valid_request_is_answered_with_a_fault(method: str, path: str) -> None:
    assert set(send_many(method, path, GenerationMode.POSITIVE)) - {404} or "{" in path


@pytest.mark.parametrize(("method", "path"), [at for at in PATHS if at[0] == "post"])
def test_valid_requests_of_few_fields_are_mostly_answered(method: str, path: str) -> None:
    """With more fields at random, some nearly always contradict each other."""
    answered = send_many(method, path, GenerationMode.POSITIVE, fields=2)
    assert answered[200] > sum(answered.values()) / 2


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "path"), [at for at in PATHS if at[0] == "post"])
def test_no_invalid_request_is_answered_with_a_fault(method: str, path: str) -> None:
    assert 400 in send_many(method, path, GenerationMode.NEGATIVE)


def send_many(method: str, path: str, mode: GenerationMode, fields: int | None = None) -> Counter[int]:
    """How often each status was answered. ``fields``: how many optional ones a body has, besides the model."""

    @settings(
        max_examples=40, derandomize=True, deadline=60_000, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(description()[path][method].as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
    def check(case: schemathesis.Case, choice: Random) -> None:
        if fields is not None and isinstance(case.body, dict):
            optional = sorted(case.body.keys() - REQUIRED)
            kept = REQUIRED.union(choice.sample(optional, min(fields, len(optional))))
            case.body = {name: value for name, value in case.body.items() if name in kept} | PLAIN[path]
        if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), float | int):
            case.body["timeout"] = max(case.body["timeout"], PATIENT)  # or 504 would be a right answer
        answered[case.call_and_validate(checks=CHECKED).status_code] += 1

    answered: Counter[int] = Counter()
    check()
    return answered
