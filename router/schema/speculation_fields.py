"""How a request steers speculation: the object ``speculation``, and OpenAI's ``prediction``.

None of it bears on the text, but for ``speculation.rule``, and that not on its law. With speculation off a prediction
is checked like any other and then of no use: so the same request can be sent with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.fields import wrong_value
from router.schema.request_objects import text_of
from router.schema.request_schema import Body
from router.text.tokenizer import Tokenizer
from speculation.messages import Source, SourceName, Speculation, Token


def speculation_of(body: Body, default: Speculation, registered: Sequence[SourceName] = ()) -> Speculation:
    """The field ``speculation`` over what the server does by default. Raises :class:`ApiError`.

    ``registered``: draft sources there are besides the built-in ones.
    """
    if body.speculation is None:
        return default
    given = body.speculation.model_dump(exclude_none=True, exclude={"details"})
    if "sources" in given:
        names = (*Source, *registered)
        if any(source not in names for source in given["sources"]):
            raise wrong_value(
                "speculation.sources", f"a list of draft sources, among {', '.join(names)}", given["sources"]
            )
        given["sources"] = frozenset(given["sources"])
    return replace(default, **given)


def wants_details(body: Body) -> bool:
    """``speculation.details``: whether the answer tells of steps and proposals, and ends with a summary."""
    return body.speculation is not None and body.speculation.details


def prediction_of(body: Body, tokenizer: Tokenizer, model: ServedModel) -> tuple[Token, ...]:
    """The field ``prediction`` as tokens; none if it is absent. Raises :class:`ApiError`."""
    text = "" if body.prediction is None else text_of(body.prediction.content)
    tokens = tokenizer.encode(text, special=False) if text else ()
    where = "prediction.content"
    if len(tokens) > model.context:
        message = f"{where} has {len(tokens)} tokens; the model's context is {model.context}"
        raise ApiError("context_length_exceeded", message, where)
    if (worst := max(tokens, default=0)) >= model.vocabulary:
        message = f"{where} has token id {worst}; the model's ids go from 0 to {model.vocabulary - 1}"
        raise ApiError("invalid_value", message, where)
    return tokens
