"""What all JSON objects of a request have in common, and errors that name the field, the value and what would be right.

The objects are pydantic models, so that each field is declared once: parsing, the OpenAPI description, ``docs/api.md``
and the words of errors come from it, by way of its JSON Schema. ``null`` stands for an absent field, as in OpenAI's
API. A ``bool`` is never taken for a number, nor a float for an integer. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from router.errors import ApiError

SHOWN_CHARACTERS = 60
"""How much of a refused value a message repeats."""
SHOWN_NAME = 64
FEW_NAMES = 4
REFUSED_MARK = "Not supported: "
"""With which the description of a refused field begins."""
TAGS = ("<string>", "<array>", "<object>")
"""Of the alternatives of a field, by the JSON type that decides which one it is; see :func:`json_type`."""


def show(value: object) -> str:
    """A JSON value as a message shows it: short, and on one line."""
    if isinstance(value, list | dict) and len(value) > SHOWN_CHARACTERS:
        return f"a JSON {'array' if isinstance(value, list) else 'object'} of {len(value)} entries"
    try:
        text = json.dumps(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    except RecursionError:
        return f"a deeply nested JSON {'array' if isinstance(value, list) else 'object'}"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def shortened(name: str) -> str:
    """The name of a field that is not known, as a message shows it."""
    return name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."


def loads(text: str) -> object:
    """The JSON in a string. Raises ValueError, also for half of a surrogate pair and for what is no number (NaN)."""
    try:
        value: object = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the most similar of ``names``; all names where they are few, or nothing."""
    names = sorted(names)
    close = difflib.get_close_matches(name[:SHOWN_NAME], names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {' and '.join(map(repr, names))}" if len(names) <= FEW_NAMES else ""


def wrong_type(where: str, expected: str, value: object) -> ApiError:
    """The error for a value that is not ``expected``."""
    return ApiError("invalid_type", f"{where} must be {expected}, got {show(value)}", where)


def wrong_value(where: str, expected: str, value: object) -> ApiError:
    """The error for a value of the right type that is not ``expected``."""
    return ApiError("invalid_value", f"{where} must be {expected}, got {show(value)}", where)


def missing(where: str, expected: str) -> ApiError:
    """The error for a field that must be there."""
    return ApiError("missing_required_parameter", f"{where} is missing; it must be {expected}", where)


def json_type(value: object) -> str:
    """Which of :data:`TAGS` a value is read as that is a string or an array; anything else is refused as an array."""
    return "<string>" if isinstance(value, str) else "<array>"


One = TypeVar("One")
Many = TypeVar("Many")
Array = Annotated[list[Many], pydantic.Field(fail_fast=True)]
"""All entries of which are alike; the first that is not is the one that an error is about."""
StringOr = Annotated[
    Annotated[One, pydantic.Tag("<string>")] | Annotated[Many, pydantic.Tag("<array>")],
    pydantic.Discriminator(json_type),
]


def at_most(entries: int) -> pydantic.BeforeValidator:
    """The size of an object is looked at before what is in it: there may be millions of wrong values."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_long", "too long")
        return value

    return pydantic.BeforeValidator(check)


class RefusedField(NamedTuple):
    """A field that is known and not carried out, but accepted with a value that asks for nothing."""

    reason: str
    neutral: tuple[object, ...] = ()
    """The values, besides null, that ask for nothing: client libraries send them unasked."""


class Fields(pydantic.BaseModel):
    """A JSON object. A docstring says what a field does and, after "Default:", what holds without it."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    names: ClassVar[frozenset[str]] = frozenset()
    """Of the fields that are carried out."""
    refused: ClassVar[Mapping[str, RefusedField]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.names = frozenset(field.alias or name for name, field in cls.__pydantic_fields__.items())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler) -> Schema:
        """With the refused fields."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, (reason, neutral) in cls.refused.items():
            schema["properties"][name] = {"enum": [*neutral, None], "description": f"{REFUSED_MARK}{reason}."}
        return schema

    @classmethod
    def read(cls, raw: Mapping[str, object]) -> Self:
        """An object as ``json.loads`` gives it. Raises :class:`ApiError`."""
        try:
            return cls.model_validate(raw)
        except pydantic.ValidationError as error:
            raise _refusal(cls, raw, error.errors(include_url=False)[0]) from None

    @pydantic.model_validator(mode="before")
    @classmethod
    def asked(cls, raw: Any) -> Any:
        """What is left without the fields that ask for nothing. What is not known is refused."""
        if not isinstance(raw, dict) or (raw.keys() <= cls.names and None not in raw.values()):
            return raw
        for name, value in raw.items():
            if name not in cls.names:
                cls._check_unknown(name, value)
        return {name: value for name, value in raw.items() if value is not None and name in cls.names}

    @classmethod
    def _check_unknown(cls, name: str, value: object) -> None:
        refused = cls.refused.get(name)
        if refused is None:
            hint = nearest(name, cls.names | cls.refused.keys())
            raise refusal(shortened(name), "unknown_parameter", "there is no field {path!r}" + hint)
        if value is not None and not any(_same(value, other) for other in refused.neutral):
            message = f"{{path}} is not supported: {refused.reason}; leave it out (got {show(value)})"
            raise refusal(name, "unsupported_parameter", message)


def refusal(name: str, code: str, message: str) -> PydanticCustomError:
    """What a validator of an object raises to refuse its field ``name``. ``{path}`` in the message is where that is."""
    return PydanticCustomError("refused", "refused", {"name": name, "code": code, "message": message})


def _same(value: object, other: object) -> bool:
    """JSON equality: 1 equals 1.0 and differs from true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _innermost(model: type[Fields], raw: object, fault: ErrorDetails) -> tuple[str, Schema, Any]:
    """Path, schema and value of the innermost field or object that is at fault, not of places in arrays of scalars."""
    path, schema, value = "", json_schema(model), raw
    named = path, schema, value
    for part in fault["loc"]:
        if part in TAGS and "anyOf" in schema:
            schema = next(one for one in schema["anyOf"] if f"<{one['type']}>" == part)
            continue
        if isinstance(part, str) and "properties" not in schema and "title" in schema:
            break  # it speaks for all inside
        if isinstance(part, int):
            path, schema = f"{path}[{part}]", schema["items"]
        else:
            path = f"{path}.{shortened(part)}" if path else part
            schema = schema["properties"][part] if "properties" in schema else schema["additionalProperties"]
        value = _inside(value, part)
        if isinstance(part, str) or "properties" in schema:
            named = path, schema, value
    return named


def _inside(value: Any, part: int | str) -> Any:
    """What a JSON value holds there; None: nothing."""
    if isinstance(part, int):
        return value[part] if isinstance(value, list) else None
    return value.get(part) if isinstance(value, dict) else None


def _refusal(model: type[Fields], raw: object, fault: ErrorDetails) -> ApiError:
    """What pydantic found, as an error that names the field."""
    where, schema, value = _innermost(model, raw, fault)
    match fault["type"]:
        case "refused":
            context = fault["ctx"]
            path = f"{where}.{context['name']}" if where else context["name"]
            message = context["message"].replace("{path!r}", repr(path), 1).replace("{path}", path, 1)
            return ApiError(context["code"], message, path)
        case "invalid_value":
            return wrong_value(where, fault["msg"], value)
        case "missing":
            return missing(where, in_words(schema))
        case "literal_error" | "enum":
            return (wrong_value if isinstance(value, str) else wrong_type)(where, in_words(schema), value)
        case "float_type" if isinstance(value, int) and not isinstance(value, bool):  # too large for a float
            return wrong_value(where, in_words(schema), value)
        case kind:
            return (wrong_type if kind.endswith("_type") else wrong_value)(where, in_words(schema), value)


Schema = dict[str, Any]


def in_words(schema: Schema) -> str:
    """What a JSON Schema takes; its title, if it has one."""
    if "title" in schema:
        return str(schema["title"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    match schema.get("type"):
        case "integer" | "number":
            return _range(schema)
        case "string":
            return f"a string{_characters(schema)}"
        case "boolean":
            return "true or false"
        case "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems")
            count = "" if high is None else f"{low} to {high} " if low else f"at most {high} "
            items = schema["items"]
            several = {"integer": "token ids", "string": f"strings{_characters(items)}"}
            return f"an array of {count}{several.get(items.get('type'), 'objects')}"
        case "object":
            return "an object" + (f" of at most {schema['maxProperties']} entries" if "maxProperties" in schema else "")
        case _:
            return "any JSON"


def _range(schema: Schema) -> str:
    what = "an integer" if schema["type"] == "integer" else "a number"
    low, high = schema.get("minimum", 0), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{what} of more than {schema['exclusiveMinimum']:g} and at most {high:g}"
    if high is None:
        return f"{what} of at least {low}"
    return f"{what} from {_number(low)} to {_number(high)}"


def _characters(schema: Schema) -> str:
    if "maxLength" not in schema:
        return ", none of them empty" if "minLength" in schema else ""
    return f" of {'1 to' if 'minLength' in schema else 'at most'} {schema['maxLength']} characters"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class _Plain(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Titles say what a field takes, not its name again."""
        return False


@cache
def json_schema(model: type[pydantic.BaseModel]) -> Schema:
    """A model's JSON Schema without references, and without the null that any absent field may be."""
    schema = model.model_json_schema(schema_generator=_Plain)
    parts = schema.pop("$defs", {}) | {model.__name__: schema}
    return dict(_whole({"$ref": f"#/$defs/{model.__name__}"}, parts))


def _whole(part: Any, parts: Mapping[str, Schema]) -> Any:
    """With what it refers to, but for what is that one's own: its description, and a title that is but its name."""
    if isinstance(part, list):
        return [_whole(item, parts) for item in part]
    if not isinstance(part, dict):
        return part
    part = {"anyOf" if name == "oneOf" else name: _whole(item, parts) for name, item in part.items()}
    if "$ref" in part:
        name = part.pop("$ref").rpartition("/")[2]
        own = {"description": parts[name].get("description"), "title": name}
        part = {key: item for key, item in _whole(parts[name], parts).items() if item != own.get(key)} | part
    if "anyOf" in part and {"type": "null"} in part["anyOf"]:
        kept = [one for one in part.pop("anyOf") if one != {"type": "null"}]
        part = (kept[0] if len(kept) == 1 else {"anyOf": kept}) | part
    return part
