"""How a request steers speculation: the object ``speculation``, and OpenAI's ``prediction``.

None of it bears on the text, but for ``speculation.rule``, and that not on its law. With speculation off a prediction
is checked like any other and then of no use: so the same request can be sent with and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.chat_fields import text_part
from router.errors import ApiError
from router.field_bounds import MAX_DRAFT_DEPTH
from router.field_table import known
from router.fields import Fields
from router.generation import ServedModel
from router.tokenizer import Tokenizer
from speculation.messages import Rule, Schedule, Source, SourceName, Sources, Speculation, Token


def speculation_of(fields: Fields, default: Speculation, registered: Sequence[SourceName] = ()) -> Speculation:
    """The field ``speculation`` over what the server does by default. Raises :class:`ApiError`.

    ``registered``: draft sources there are besides the built-in ones.
    """
    inner = fields.nested("speculation")
    inner.refuse_others(known("completion", "speculation"))
    return Speculation(
        enabled=inner.boolean("enabled", default.enabled),
        max_depth=inner.integer("max_depth", default.max_depth, low=1, high=MAX_DRAFT_DEPTH),
        rule=Rule(inner.choice("rule", default.rule, list(Rule))),
        schedule=Schedule(inner.choice("schedule", default.schedule, list(Schedule))),
        sources=_sources(inner, default.sources, (*Source, *registered)),
        remember=inner.boolean("remember", default.remember),
    )


def wants_details(fields: Fields) -> bool:
    """``speculation.details``: whether the answer tells of steps and proposals, and ends with a summary."""
    return fields.nested("speculation").boolean("details")


def _sources(inner: Fields, default: Sources, names: Sequence[SourceName]) -> Sources:
    value = inner.get("sources")
    expected = f"a list of draft sources, among {', '.join(names)}"
    if value is None:
        return default
    if not isinstance(value, list):
        raise inner.wrong_type("sources", expected)
    if any(source not in names for source in value):
        raise inner.wrong_value("sources", expected)
    return frozenset(value)


def prediction_of(fields: Fields, tokenizer: Tokenizer, model: ServedModel) -> tuple[Token, ...]:
    """The field ``prediction`` as tokens; none if it is absent. Raises :class:`ApiError`."""
    if fields.get("prediction") is None:
        return ()
    inner = fields.nested("prediction")
    inner.refuse_others(frozenset({"type", "content"}))
    if inner.get("type") is None:
        raise inner.missing("type", '"content"')
    inner.choice("type", "content", ["content"])
    text = _content(inner)
    tokens = tokenizer.encode(text, special=False) if text else ()
    where = inner.where("content")
    if len(tokens) > model.context:
        message = f"{where} has {len(tokens)} tokens; the model's context is {model.context}"
        raise ApiError("context_length_exceeded", message, where)
    if (worst := max(tokens, default=0)) >= model.vocabulary:
        message = f"{where} has token id {worst}; the model's ids go from 0 to {model.vocabulary - 1}"
        raise ApiError("invalid_value", message, where)
    return tokens


def _content(inner: Fields) -> str:
    """A string, or text parts that follow each other."""
    value = inner.get("content")
    if value is None:
        raise inner.missing("content", "a string or an array of text parts")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise inner.wrong_type("content", "a string or an array of text parts")
    return "".join(text_part(part, f"{inner.where('content')}[{index}]") for index, part in enumerate(value))
