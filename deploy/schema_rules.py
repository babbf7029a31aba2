"""Whether every object has the shape its kind allows. A field that is unknown is refused: a cluster would drop it.

And whether there is the one RayService that all other rules look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from deploy.manifests import Manifests, Object, Violation, where

KUBERNETES = "1.32"
"""Whose schemas Kubernetes' own kinds are checked with."""
SCHEMAS = Path(__file__).parent / "schemas"
RAYSERVICE = "ray.io/v1/RayService"
LONGEST = 200
"""Characters of a message; a schema's may quote a whole manifest."""


def schema_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of every object. One whose kind has no schema here is a finding as well."""
    for entry in manifests.objects:
        for what in _faults(entry):
            yield where(entry), what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
    if (count := len(manifests.of("RayService"))) != 1:
        yield "manifests", f"there must be one RayService, not {count}"


def _faults(entry: Object) -> Iterator[str]:
    validator = _validators().get(f"{entry.get('apiVersion')}/{entry['kind']}")
    if validator is not None:
        for error in sorted(validator.iter_errors(entry), key=str):
            yield f"{error.json_path.removeprefix('$.')}: {error.message}"
        return
    yield from _kubernetes_faults(json.dumps(entry))


@cache
def _kubernetes_faults(text: str) -> tuple[str, ...]:
    """Of an object of Kubernetes' own, as JSON. Kept: every call reads all of Kubernetes' schemas anew."""
    entry = json.loads(text)
    try:
        kubernetes_validate.validate(entry, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return (f"there is no schema for {entry.get('apiVersion')} {entry['kind']} in {SCHEMAS.name}/",)
    except kubernetes_validate.ValidationError as error:
        return (f"{'.'.join(str(part) for part in error.path)}: {error.message}",)
    return ()


@cache
def _validators() -> dict[str, jsonschema.Draft202012Validator]:
    """For the kinds that other operators bring, by API version and kind."""
    schemas: dict[str, Any] = yaml.safe_load((SCHEMAS / "others.yaml").read_text(encoding="utf-8"))["kinds"]
    schemas[RAYSERVICE] = json.loads((SCHEMAS / "rayservice.json").read_text(encoding="utf-8"))
    return {kind: jsonschema.Draft202012Validator(schema) for kind, schema in schemas.items()}
