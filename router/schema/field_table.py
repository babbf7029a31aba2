"""The table of every request field, read off the models of :mod:`router.schema.request_schema`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from router.schema.fields import REFUSED_MARK
from router.schema.json_schema import Schema, json_schema
from router.schema.request_schema import BODIES, Kind

LABEL_MARK = "No effect. "
"""With which the description of a label begins."""


class FieldSupport(StrEnum):
    """What becomes of a field."""

    SUPPORTED = "supported"
    LABEL = "accepted, has no effect"
    REFUSED = "refused"


MARKS = {REFUSED_MARK: FieldSupport.REFUSED, LABEL_MARK: FieldSupport.LABEL}


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field, by the path to it: ``stream_options.include_usage``, ``messages[].role``."""

    name: str
    schema: Schema
    """JSON Schema of its values but null; of a refused one, of those that ask for nothing."""
    about: str
    """What it does; of a refused one, why it does not."""
    default: str = ""
    """In words."""
    examples: tuple[object, ...] = ()
    where: Literal["both", Kind] = "both"
    """The endpoints that know it."""
    required: bool = False
    support: FieldSupport = FieldSupport.SUPPORTED

    @property
    def inside(self) -> str:
        """The path of the object it is a field of; empty for the body."""
        return self.name.rpartition(".")[0]

    @property
    def own_name(self) -> str:
        """Without the path."""
        return self.name.rpartition(".")[2]

    def of(self, kind: Kind) -> bool:
        """Whether the endpoint knows it."""
        return self.where in ("both", kind)


def _rows(body: Schema, where: Literal["both", Kind], inside: str = "") -> Iterator[FieldRow]:
    """The fields of an object that are described, and those of the objects inside it."""
    for key, field in body["properties"].items():
        name = inside + key
        if "description" in field:
            schema = {part: field[part] for part in field.keys() - {"default", "description", "examples"}}
            about, _, default = " ".join(field["description"].split()).partition(" Default: ")
            support = next(
                (support for mark, support in MARKS.items() if about.startswith(mark)), FieldSupport.SUPPORTED
            )
            about = about.removeprefix(REFUSED_MARK).removeprefix(LABEL_MARK)
            default = default or _shown(field.get("default"))
            examples, required = tuple(field.get("examples", ())), key in body.get("required", ())
            yield FieldRow(name, schema, about, default, examples, where, required, support)
        for inner, mark in ((field, "."), (field.get("items", {}), "[].")):
            if "properties" in inner:
                yield from _rows(inner, where, name + mark)


def _shown(default: object) -> str:
    if default is None:
        return ""
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)


def _table() -> Iterator[FieldRow]:
    """What both endpoints know alike is there once."""
    tables = {kind: {row.name: row for row in _rows(json_schema(body), "both")} for kind, body in BODIES.items()}
    for kind, table in tables.items():
        for name, row in table.items():
            alike = all(other.get(name) == row for other in tables.values())
            if not alike:
                yield replace(row, where=kind)
            elif kind == "completion":
                yield row


ROWS: tuple[FieldRow, ...] = tuple(_table())
