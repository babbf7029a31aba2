"""The request fields ``speculation`` and ``prediction``: what they come to, and errors that name the field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.prompts import prediction_of
from router.schema.request_schema import Body
from router.schema.requests import ModelEntry, speculation_of
from router.text.tokenizer import Tokenizer
from speculation.messages import Rule, Schedule, Source, Speculation
from tests.fakes import tiny_tokenizer
from tests.parsing import parse_completion

CONTEXT = 64


@cache
def shared() -> Tokenizer:
    return tiny_tokenizer()


def predicted(value: Any, vocabulary: int | None = None) -> tuple[int, ...]:
    model = ServedModel("tiny", vocabulary or shared().size, CONTEXT, 0)
    return prediction_of(Body.read({"prediction": value}), shared(), model)


def steered(**inner: Any) -> Speculation:
    return speculation_of(Body.read({"speculation": inner}), Speculation(max_depth=7))


def test_every_part_of_speculation_arrives_over_the_default() -> None:
    assert speculation_of(Body.read({}), Speculation(max_depth=7)) == steered() == Speculation(max_depth=7)
    assert steered(
        enabled=False, max_depth=3, rule="rejection", schedule="parallel", sources=["draft", "prediction"], details=True
    ) == Speculation(False, 3, Rule.REJECTION, Schedule.PARALLEL, frozenset({Source.DRAFT, Source.PREDICTION}))
    assert steered(sources=[]).sources == frozenset()


def test_a_prediction_is_text_or_text_parts_without_special_tokens() -> None:
    text = "hello 世界"
    tokens = shared().encode(text, special=False)
    assert predicted({"type": "content", "content": text}) == tokens
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "世界"}]
    assert predicted({"type": "content", "content": parts}) == tokens
    assert predicted(None) == predicted({"type": "content", "content": ""}) == ()
    assert predicted({"type": "content", "content": []}) == ()


@pytest.mark.parametrize(
    ("value", "code", "param", "text"),
    [
        ("hello", "invalid_type", "prediction", "object"),
        ({}, "missing_required_parameter", "prediction.type", '"content"'),
        ({"type": "text", "content": "x"}, "invalid_value", "prediction.type", "content"),
        ({"type": 3, "content": "x"}, "invalid_type", "prediction.type", "3"),
        ({"type": "content"}, "missing_required_parameter", "prediction.content", "text parts"),
        ({"type": "content", "content": 5}, "invalid_type", "prediction.content", "5"),
        ({"type": "content", "content": "x", "more": 1}, "unknown_parameter", "prediction.more", "no field"),
        ({"type": "content", "content": ["x"]}, "invalid_type", "prediction.content[0]", "an object"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": "x"}]},
            "unsupported_parameter",
            "prediction.content[0].type",
            "text only",
        ),
        (
            {"type": "content", "content": "q " * CONTEXT},
            "context_length_exceeded",
            "prediction.content",
            "the model's context is 64",
        ),
    ],
)
def test_a_bad_prediction_is_refused_by_its_name(value: Any, code: str, param: str, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        predicted(value)
    assert (refused.value.code.name, refused.value.code.status, refused.value.param) == (code, 400, param)
    assert text in refused.value.message


def test_a_token_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ApiError, match=r"prediction.content has token id \d+; the model's ids go from 0 to 9"):
        predicted({"type": "content", "content": "hello"}, vocabulary=10)


@pytest.mark.parametrize(
    ("inner", "code", "param"),
    [
        ({"details": 1}, "invalid_type", "speculation.details"),
        ({"sources": "draft"}, "invalid_type", "speculation.sources"),
        ({"sources": ["oracle"]}, "invalid_value", "speculation.sources"),
        ({"sources": [["draft"]]}, "invalid_value", "speculation.sources"),
        ({"rule": "typical"}, "invalid_value", "speculation.rule"),
        ({"max_depth": 65}, "invalid_value", "speculation.max_depth"),
        ({"detail": True}, "unknown_parameter", "speculation.detail"),
    ],
)
def test_bad_steering_is_refused_by_its_name(inner: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        speculation_of(Body.read({"speculation": inner}), Speculation())
    assert (refused.value.code.name, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({"seed": 1}, False),
        ({"seed": 1, "n": 2}, False),
        ({}, True),
        ({"seed": 1, "temperature": 0}, True),
        ({"seed": 1, "rule": "coupled"}, True),
    ],
)
def test_a_prediction_that_may_know_the_coin_is_not_drafted(fields: dict[str, Any], used: bool) -> None:
    """An answer of the same seed is what its coins decided, so that the rejection rule's law would not hold for it."""
    entry = ModelEntry("tiny", ServedModel("tiny", shared().size, CONTEXT, 0), shared(), max_choices=4)
    rule = {"speculation": {"rule": fields.pop("rule", "rejection")}}
    body = {"prompt": "hi", "prediction": {"type": "content", "content": "hello"}, **rule, **fields}
    request = parse_completion(json.dumps(body).encode(), {"tiny": entry}, "r1")
    assert {bool(generation.request_options.prediction) for generation in request.generations} == {used}
    with pytest.raises(ApiError, match=r"prediction\.type"):
        parse_completion(json.dumps(body | {"prediction": {"type": "text"}}).encode(), {"tiny": entry}, "r1")
