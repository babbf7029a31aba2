"""Random JSON schemas that end, for tests and measurements of structured output."""

from __future__ import annotations

from random import Random
from typing import Any


def random_schema(rng: Random, depth: int = 2) -> dict[str, Any]:
    """A schema that some short JSON fits."""
    simple = ("boolean", "null", "integer", "number", "string", "enum", "const", "anyOf")
    match rng.choice(simple + (("object", "object", "array") if depth else ())):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}
        case "string" if rng.random() < 0.3:
            return {"type": "string", "pattern": rng.choice(("^[a-c]{2,4}$", "^x(yz)*$", "^[0-9]{3}-[0-9]{2}$"))}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "enum":
            values = ["red", "green", "greener", 1, 2.5, None, True, [1], {"a": 1}, 'q"\\']
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["fixed", 7, False])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, 0) for _ in range(2)]}
        case "array" | "object" as kind:
            return _nested(rng, kind, depth - 1)
        case plain:
            return {"type": plain}


def _nested(rng: Random, kind: str, depth: int) -> dict[str, Any]:
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    names = rng.sample(["name", "age", "ok", "tags", "kind", "é", "a b"], rng.randint(0, 3))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
