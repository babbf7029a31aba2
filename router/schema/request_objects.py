"""The objects inside request bodies: messages, tools, forms of text, and what steers a stream or its drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetPydanticSchema,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from router.schema.fields import Array, Fields, RefusedField, StringOr, loads, refusal
from speculation.messages import Rule, Schedule, Source
from speculation.sources.registry import NAME

INSTEAD_TOOLS = "use tools and tool_choice"
TEXT_ONLY = "models here read and write text only"

Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[Array[Text], Field(min_length=1, max_length=1024)]
JsonSchema = Annotated[Any, WithJsonSchema({"title": "a JSON Schema, as such or in a string"})]
_NAMES = {"anyOf": [{"enum": [*Source]}, {"type": "string", "pattern": f"^{NAME.pattern}$"}]}
_SOURCES = f"an array of {', '.join(Source)}, and names that the operator registered"
Sources = Annotated[list[Any], WithJsonSchema({"title": _SOURCES, "type": "array", "items": _NAMES})]


def _writable(value: object) -> object:
    """What can be written as JSON again: a number that is too large for a float was read as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        expected = "an object, not nested too deeply, without too large numbers"
        raise PydanticCustomError("invalid_value", expected) from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
"""What it holds goes into the prompt as it is."""


def _json_object(text: object) -> object:
    """What is written in a string."""
    if not isinstance(text, str):
        raise PydanticCustomError("json_type", "no string")
    try:
        value = loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_value", "a JSON object in a string")
    return value


def _as_written(value: Any, check: Any) -> Any:
    """What a model takes, in the caller's order, since a chat template shows it."""
    check(value)
    return {name: item for name, item in value.items() if item is not None}


class TextPart(Fields, title='an object {"type": "text", "text": ...}'):
    """A part of a content."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None

    @model_validator(mode="before")
    @classmethod
    def text_only(cls, raw: Any) -> Any:
        """Checked before the names of fields are: other types have others."""
        if isinstance(raw, dict) and raw.get("type") not in (None, "text"):
            raise refusal("type", "unsupported_parameter", '{path} must be "text"; this model reads text only')
        return raw


TextParts = Annotated[Array[TextPart], Field(json_schema_extra={"minItems": 1})]
Content = Annotated[StringOr[str, TextParts], Field(title="a string or an array of text parts")]


def text_of(content: str | list[TextPart], between: str = "") -> str:
    """The text of a content; ``between`` its parts."""
    return content if isinstance(content, str) else between.join(part.text for part in content)


class CalledFunction(Fields):
    """The function of a call."""

    name: str
    arguments: Annotated[
        dict[str, Any],
        BeforeValidator(_json_object),
        WithJsonSchema({"type": "string", "title": "a JSON object in a string"}),
    ] = Field({})
    parsed_arguments: Any = None
    """No effect. What OpenAI's client read `arguments` as."""


class Call(Fields, title="an object with id, type and function"):
    """A call that an assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction = Field(title="an object with name and arguments")
    index: Any = None


class Message(Fields, title="an object with role and content"):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; `developer` is `system`."""
    content: Content | None = None
    """What is said. Only an assistant that calls tools may say nothing."""
    name: str | None = None
    """For templates that show it."""
    tool_calls: Array[Call] | None = None
    """What an assistant called: `id`, `type` and `function` with `name` and `arguments` (JSON in a string). For a chat
    template that takes one call in a message each is a message of its own, with what answers its `id` behind it."""
    tool_call_id: str | None = None
    """Which call a message of role `tool` answers."""
    parsed: Any = None
    """No effect. What OpenAI's client read `content` as."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        "function_call": RefusedField(INSTEAD_TOOLS),
        "refusal": RefusedField("put what was said into content", ("",)),
        "audio": RefusedField(TEXT_ONLY),
        "annotations": RefusedField("put what matters into content", ([],)),
        "reasoning_content": RefusedField("put what matters into content", ("",)),
    }


class Function(Fields, title="an object with a name"):
    """A function that a model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", title="1 to 64 letters, digits, underscores, dots and dashes")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool = False
    """True: whenever it is called, its arguments follow `parameters`. Text beside calls is free, but what begins as a
    call is one."""


class Tool(Fields, title="an object with type and function"):
    """One of ``tools``."""

    type: Literal["function"]
    function: Annotated[
        dict[str, Any],
        GetPydanticSchema(lambda _, schema: no_info_wrap_validator_function(_as_written, schema(Function))),
    ]


class NamedFunction(Fields):
    """Which function is to be called."""

    name: str = Field(title="the name of one of tools")


class NamedTool(Fields):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | NamedTool) else "<string>"),
    Field(title='none, auto, required or {"type": "function", "function": {"name": ...}}'),
]


class DescribedSchema(Fields):
    """A JSON Schema, as OpenAI's API names it."""

    name: str | None = None
    description: str | None = None
    strict: bool = False
    schema_: Any = Field(None, alias="schema", title="a JSON schema")


class ResponseFormat(Fields):
    """The form of an answer, as OpenAI's API says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: DescribedSchema | None = None


class StructuredOutputs(Fields):
    """The form of a text, as vLLM's API says it."""

    json_: JsonSchema = Field(None, alias="json", examples=[{"type": "null"}, "{}"])
    """The text is JSON that fits it."""
    regex: str | None = Field(None, examples=["[a-z]{3}"])
    """The text matches it as a whole."""
    choice: Choices | None = Field(None, examples=[["a", "b c"]])
    """The text is one of these."""
    grammar: str | None = Field(None, examples=['start: "a" | "b"', 'root ::= "a" | "b" root'])
    """The text is one of this grammar's, in Lark's or llama.cpp's notation."""
    json_object: Annotated[bool, WithJsonSchema({"const": True})] | None = Field(None, examples=[True])
    """The text is any JSON object."""
    whitespace_pattern: str | None = None
    """A regular expression: what may stand between the parts of JSON. Default: up to 40 white spaces"""
    disable_any_whitespace: bool = False
    """True: nothing may."""
    disable_fallback: bool = False
    """No effect. There is one backend, and none to fall back on."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        "structural_tag": RefusedField("use grammar"),
        "disable_additional_properties": RefusedField("write additionalProperties into the schema", (False,)),
    }


class StreamOptions(Fields):
    """What a stream shows beside its text."""

    include_usage: bool = Field(False, examples=[True])
    """A last chunk with the usage."""
    continuous_usage_stats: bool = Field(False, examples=[True])
    """The usage so far in every chunk; only with `include_usage`."""
    include_speculation: bool = Field(False, examples=[True])
    """What was drafted and kept, with every chunk."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        "include_obfuscation": RefusedField("chunks are not padded", (False,))
    }


class Prediction(Fields):
    """What a text will probably be."""

    type: Literal["content"]
    content: Content


class Steering(Fields):
    """How drafting goes."""

    enabled: bool | None = Field(None, examples=[True])
    """False: plain decoding. Default: as the server says"""
    max_depth: int | None = Field(None, ge=1, le=64, examples=[2])
    """Longest path of drafts. Default: as the server says"""
    sources: Sources | None = Field(None, examples=[["lookup"]])
    """Who may draft. Default: as the server says"""
    remember: bool | None = Field(None, examples=[False])
    """False: what is said is not kept to draft for later requests (of the same API key, unless the operator decided
    otherwise). Leave `suffix` out of `sources` to do without what is kept of earlier ones.
    Default: as the server says"""
    rule: Rule | None = Field(None, strict=False, examples=["coupled"])
    """What makes the target keep a draft. `coupled`: that it is what the seed gives. `rejection`: a coin; all texts are
    as likely as without drafts, but which one a seed gives depends on them, unless `temperature` is 0.
    Default: as the server says"""
    details: bool = Field(False, examples=[True])
    """Tell of every step and proposal, and sum up at the end."""
    schedule: Schedule | None = Field(None, strict=False, examples=["sequential"])
    """When drafts are made. Default: as the server says"""


class CacheOptions(Fields):
    """Hints about caches."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
