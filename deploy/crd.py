"""Turns KubeRay's CRD into the JSON schema that manifests are checked with, strict: unknown fields are refused.

Kubernetes prunes unknown fields without a word, so a misspelt one would have no effect. For another version of KubeRay:

    python -m deploy.crd ray.io_rayservices.yaml > deploy/schemas/rayservice.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1"
_SCHEMAS = ("properties", "patternProperties")
"""Keywords whose values are schemas by name."""
_NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "not")
_OPEN_ENDED = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")
_NUMBERS = ("int32", "int64", "float", "double")


def strict_schema(crd: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of :data:`VERSION` of a CustomResourceDefinition; metadata and status are left open."""
    found = next(entry for entry in crd["spec"]["versions"] if entry["name"] == VERSION)
    schema: dict[str, Any] = _strict(found["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"metadata": {"type": "object"}, "status": {"type": "object"}}
    return schema


def _strict(schema: Any) -> Any:
    """OpenAPI as Kubernetes extends it, as plain JSON schema; descriptions are dropped."""
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    extensions = {key: value for key, value in schema.items() if key.startswith("x-kubernetes-")}
    dropped = {*extensions, "description", "nullable"}
    plain = {key: value for key, value in schema.items() if key not in dropped}
    if extensions.get("x-kubernetes-int-or-string"):
        plain.pop("type", None)
        plain["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    plain |= _parts(plain)
    if "properties" in plain and not any(map(extensions.get, _OPEN_ENDED)):
        plain.setdefault("additionalProperties", False)
    if plain.get("format") in _NUMBERS:
        del plain["format"]
    if schema.get("nullable") and "type" in plain:
        plain["type"] = [plain["type"], "null"]
    return plain


def _parts(schema: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that hold others, with these made strict."""
    by_name = {key: {name: _strict(one) for name, one in schema[key].items()} for key in schema.keys() & _SCHEMAS}
    return by_name | {key: _strict(schema[key]) for key in schema.keys() & _NESTED}


if __name__ == "__main__":
    json.dump(strict_schema(yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))), sys.stdout, sort_keys=True)
    sys.stdout.write("\n")
