"""The table of every request field: what it takes, what it does, or why it is refused.

Everything that speaks of fields reads this table: parsing (which names exist, and the reasons of refusals), the OpenAPI
description (:mod:`router.openapi`), ``docs/api.md`` (:mod:`router.describe`), and the tests that send every field.

A field that is refused is still accepted with a value that asks for nothing ("neutral"), because client libraries send
such values unasked. ``null`` is neutral for every field, as it is for OpenAI. Fields that are in no row are refused: no
parameter is silently ignored.
"""

from __future__ import annotations

from functools import cache

from router.field_row import Kind, Row, Support
from router.fields import Refusals
from router.refused_fields import REFUSED
from router.supported_fields import SUPPORTED

ROWS: tuple[Row, ...] = (*SUPPORTED, *REFUSED)


def rows_inside(kind: Kind, inside: str = "") -> list[Row]:
    """The fields of an object that an endpoint knows; of the body itself by default."""
    return [row for row in ROWS if row.inside == inside and row.of(kind)]


@cache
def known(kind: Kind, inside: str = "") -> frozenset[str]:
    """The names of those that are carried out."""
    return frozenset(row.own_name for row in rows_inside(kind, inside) if row.support is not Support.REFUSED)


@cache
def refusals(kind: Kind, inside: str = "") -> Refusals:
    """Those that are refused."""
    rows = (row for row in rows_inside(kind, inside) if row.support is Support.REFUSED)
    return {row.own_name: (row.about, tuple(row.schema["enum"])) for row in rows}
