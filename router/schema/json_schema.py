"""JSON Schemas of pydantic models, whole, and in the words that errors and documentation use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

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
            return f"an array of {count}{_several(schema['items'])}"
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


def _several(schema: Schema) -> str:
    match schema.get("type"):
        case "integer":
            return "token ids"
        case "string":
            return f"strings{_characters(schema)}"
        case _:
            return "objects"


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
def json_schema(model: type[BaseModel]) -> Schema:
    """A model's JSON Schema without references, and without the null that any absent field may be."""
    schema = model.model_json_schema(schema_generator=_Plain)
    parts = schema.pop("$defs", {}) | {model.__name__: schema}
    return dict(_whole({"$ref": f"#/$defs/{model.__name__}"}, parts))


def _referred(name: str, parts: Mapping[str, Schema]) -> Schema:
    """A schema that others refer to, without what is its own: the description, and a title that is but its name."""
    whole = _whole(parts[name], parts)
    return {key: item for key, item in whole.items() if key != "description" and (key != "title" or item != name)}


def _whole(part: Any, parts: Mapping[str, Schema]) -> Any:
    if isinstance(part, list):
        return [_whole(item, parts) for item in part]
    if not isinstance(part, dict):
        return part
    part = {"anyOf" if name == "oneOf" else name: _whole(item, parts) for name, item in part.items()}
    if "$ref" in part:
        part = _referred(part.pop("$ref").rpartition("/")[2], parts) | part
    if "anyOf" in part and {"type": "null"} in part["anyOf"]:
        kept = [one for one in part.pop("anyOf") if one != {"type": "null"}]
        part = (kept[0] if len(kept) == 1 else {"anyOf": kept}) | part
    return part
